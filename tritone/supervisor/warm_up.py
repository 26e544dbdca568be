"""A request of the server's own to each ensemble, before anyone is told that it is ready.

A stage warms itself up while it loads. What lies between the stages, in Triton and at the first message of each, is made at
the first request, and would cost whoever sends it a tenth of a second.
"""

from __future__ import annotations

import http.client
import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

from tritone.errors import TritoneError

_CHAT: Mapping[str, Any] = {"messages": "Hello", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
REQUESTS: Mapping[str, Mapping[str, Any]] = {"chat": _CHAT, "omni": _CHAT, "speech": {"text": "Hello."}}
"""What each ensemble is asked."""
_ANSWERED = ("audio", "end")
"""A first piece of audio has been through every stage. An answer may also end without one: not every text is spoken."""
_FAILED = ("error", "cancelled", "audio_lost")


def warm_up(address: str, model: str, deadline: float) -> None:
    """Asks ``model``, one of ``REQUESTS``, and returns once it has answered; what would follow is cancelled.

    Raises TritoneError with the reason where the request fails, or has no answer at ``deadline``, in monotonic seconds.
    """
    request = REQUESTS[model]
    if model != "speech":
        # No prompt of a user begins with these pages: hits and usage are as without this request.
        request = {**request, "cache_salt": secrets.token_hex(16)}
    connection = http.client.HTTPConnection(address, timeout=max(0.1, deadline - time.monotonic()))
    try:
        connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(request))
        response = connection.getresponse()
        if response.status != 200:
            raise TritoneError(response.read().decode(errors="replace"), "UNAVAILABLE")
        for line in response:
            if time.monotonic() > deadline:
                raise TimeoutError
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            if event.get("event") in _ANSWERED:
                return
            if "error" in event or event.get("event") in _FAILED:
                raise TritoneError(event.get("error") or f"{event['event']}: {event.get('info')}", "UNAVAILABLE")
        raise TritoneError("the answer broke off", "UNAVAILABLE")
    except TimeoutError:
        raise TritoneError("no answer in time", "UNAVAILABLE") from None
    except (OSError, http.client.HTTPException) as error:
        raise TritoneError(f"no answer: {error!r}", "UNAVAILABLE") from None
    finally:
        connection.close()
