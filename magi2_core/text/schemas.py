"""JSON schemas of an enhanced caption, for the strict `json_schema` response format of a chat completion.

Standard library only, used by `enhance`. Facts: spec components.md 6.3. Strict mode wants every property required and
no others, so the schemas are built from four small functions. An answer is accepted by its top-level keys alone.
"""

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _strings(names: str) -> dict[str, Schema]:
    """String properties named by a space-separated list."""
    return dict.fromkeys(names.split(), STRING)


def _global_layer() -> Schema:
    attributes = _object(**_strings("gender ethnicity age_group facial_features clothing appearance_details"))
    return _object(
        **_strings("context description"),
        aesthetics=_object(**_strings("style contrast saturation color_scheme visual_effects mood_atmosphere")),
        audio_baseline=_object(ambience=STRING, dialogue=_object(language=STRING, speaker_tags=_array(STRING))),
        objects_static=_array(_object(**_strings("object_id description shape_and_color texture relative_size position orientation"))),
        video_metadata=_object(duration=NUMBER, aspect_ratio=STRING),
        lighting_baseline=_object(**_strings("conditions direction shadows source_consistency")),
        environment_baseline=_object(background_setting=STRING),
        alive_subjects_static=_array(
            _object(**_strings("subject_id description position orientation"), visual_attributes=attributes),
        ),
        camera_cinematography=_object(**_strings("overall_camera_style default_depth_of_field lens_focal_length")),
    )


def _timeline_segment() -> Schema:
    place = _object(**_strings("location relative_size orientation"))
    camera = _object(**_strings("focus camera_position composition"), camera_movement=_object(**_strings("type direction intensity")))
    action = _object(**_strings("primary_action body_configuration motion_detail interaction facial_expression"))
    return _object(
        segment_basic_info=_object(**_strings("timestamp_range segment_description active_background lighting_delta"), camera_delta=camera),
        objects=_array(
            _object(
                **_strings("object_id timestamp"),
                number_of_objects=INTEGER,
                dynamic_state=_object(**_strings("state_change motion_detail visible_condition")),
                spatial_position=place,
            )
        ),
        alive_subjects=_array(
            _object(**_strings("subject_id timestamp"), number_of_subjects=INTEGER, spatial_position=place, action=action)
        ),
        text_render=_array(_object(**_strings("text timestamp location size color font appearance_details"))),
        causal_events=_array(_object(**_strings("event_id timestamp_range trigger effect_outcome physics"))),
        audio=_object(
            dialogue_lines=_array(_object(**_strings("timestamp speaker text delivery"))),
            ambience_deltas=_array(_object(**_strings("timestamp_range ambience"))),
            special_audio_events=_array(_object(**_strings("timestamp sound_description visual_sync"))),
        ),
    )


def _image_properties() -> dict[str, Schema]:
    seconds = _array(NUMBER)
    shot = {
        **_strings("shot_identifier"),
        "time_range_seconds": seconds,
        **_strings("scene_reference_identifier shot_caption camera_lighting_and_composition motion_and_physical_logic"),
        "reference_identifiers": _array(STRING),
        "audio_event_identifiers": _array(STRING),
    }
    sound = {
        **_strings("audio_event_identifier event_type"),
        "time_range_seconds": seconds,
        **_strings("source_reference_identifier audio_caption spoken_text synchronization_note"),
    }
    lettering = {
        **_strings("visible_text_identifier text"),
        "time_range_seconds": seconds,
        **_strings("position_and_role source_reference_identifier"),
    }
    general = _strings("core_caption format_and_structure narrative_and_emotional_design visual_design audio_design")
    return {
        "global_caption": _object(**general, continuity_requirements=_array(STRING)),
        "reference_bank": _array(_object(**_strings("reference_identifier reference_type label role description appearance_or_design"))),
        "shot_timeline": _array(_object(**shot)),
        "audio_event_timeline": _array(_object(**sound)),
        "visible_text": _array(_object(**lettering)),
        "generation_requirements": _array(STRING),
    }


def caption_schema(task: str) -> Schema:
    """Schema of the answer to task "t2v" (text alone) or "i2v" (text and a first frame)."""
    assert task in ("t2v", "i2v"), task
    if task == "i2v":
        return _object(**_image_properties())
    return _object(global_layer=_global_layer(), dynamic_layer=_object(timeline_segments=_array(_timeline_segment())))


def response_format(task: str) -> dict[str, Any]:
    """The `response_format` entry of a chat completion for a task."""
    name = "I2VEnhanceResult" if task == "i2v" else "T2VEnhanceResult"
    return {"type": "json_schema", "json_schema": {"name": name, "strict": True, "schema": caption_schema(task)}}
