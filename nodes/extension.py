"""What ComfyUI gets from the pack: folders, routes and the node list, each made when it asks for them."""

import logging
from typing import Any

from comfy_api.latest import ComfyExtension

from . import folders, node_classes, routes

log = logging.getLogger("magi2.nodes")


class Magi2Extension(ComfyExtension):
    """The pack's nodes; one whose schema this host refuses is left out and named, the others stay."""

    async def get_node_list(self) -> list[Any]:
        """Classes whose schema the host accepts."""
        accepted = []
        for node in node_classes():
            try:
                node.GET_SCHEMA()
            except Exception:
                log.exception("node %s is left out: this ComfyUI does not take its description", node.__name__)
                continue
            accepted.append(node)
        return accepted


def make_extension() -> Magi2Extension:
    """Registers folders and routes, and returns the extension."""
    folders.register()
    folders.offer_example()
    routes.register()
    return Magi2Extension()
