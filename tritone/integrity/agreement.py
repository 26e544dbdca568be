"""Whether the two page pools of a server fit together and to their deployment; looked at before a stage serves."""

from __future__ import annotations

from pathlib import Path

from tritone.deployment import Deployment
from tritone.errors import InvalidArgument
from tritone.pools import files
from tritone.sizes import KV_DTYPES

PAGE_AXIS = 3
"""A page is [layers, 2, kv_heads, page_size, head_dim]."""


def check_pools(deployment: Deployment, directory: Path) -> None:
    """Raises :class:`InvalidArgument` naming both values. The stage that starts first sees its own pool alone; the other one
    sees both."""
    headers = {}
    for name in ("prefill", "decode"):
        path = directory / f"{name}_pages.json"
        if path.exists():
            headers[name] = files.read_header(path)
    for name, header in headers.items():
        found, wanted = header.shape[PAGE_AXIS], deployment.page_size
        if found != wanted:
            raise InvalidArgument(f"{name}'s page_size: {found} does not fit the deployment's page_size: {wanted}")
        kv = KV_DTYPES[getattr(deployment, name).kv]
        if header.dtype != kv:
            raise InvalidArgument(f"{name}'s pages: {header.dtype} does not fit the deployment's {name}.kv: {kv}")
        if header.blocks * found < deployment.max_context:
            raise InvalidArgument(
                f"{name}'s pool: {header.blocks * found} tokens do not hold max_context: {deployment.max_context}"
            )
    if len(headers) == 2 and headers["prefill"].shape != headers["decode"].shape:
        prefill, decode = (list(headers[name].shape) for name in ("prefill", "decode"))
        raise InvalidArgument(f"prefill's pages: {prefill} do not fit decode's pages: {decode}; both need one checkpoint")
