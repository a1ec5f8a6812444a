"""Models of the Hugging Face hub, kept by default in the hub's own cache, which other tools share."""

from __future__ import annotations

import os
import re
from pathlib import Path

from checkpoint.checkpoint import CheckpointError

_WEIGHTS = "*.safetensors"
_TEXT = ["*.json", "*.jinja", "*.model", "*.txt"]
_IGNORED = ["*/*", "consolidated*", "README*", "LICENSE*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None


def fetch_hub(
    name: str,
    *,
    cache_dir: Path | None = None,
    offline: bool = False,
    revision: str | None = None,
    weights: bool = True,
) -> Path:
    """The local folder of a snapshot; downloads only what is missing. Without `weights`: config, tokenizer
    and chat template alone, a few megabytes.

    `cache_dir` None: the hub client's own choice (`HF_HOME`). `HF_TOKEN` is honoured by that client.
    Raises `CheckpointError` that says what to do.
    """
    # Imported late: it costs a quarter of a second that local models need not pay.
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f" at revision {revision}" if revision else ""
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            cache_dir=cache_dir,
            local_files_only=offline,
            allow_patterns=[_WEIGHTS, *_TEXT] if weights else _TEXT,
            ignore_patterns=_IGNORED,
        )
    except GatedRepoError as error:
        raise CheckpointError(
            f"the model {name} is gated: accept its terms on the hub and set HF_TOKEN to a token with access"
        ) from error
    except RepositoryNotFoundError as error:
        token = "with this HF_TOKEN" if os.environ.get("HF_TOKEN") else "(private models need HF_TOKEN)"
        raise CheckpointError(
            f"unknown model {name}: neither a local folder or file, nor on the hub {token}"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"the model {name} has no revision {revision!r}") from error
    except HFValidationError as error:
        raise CheckpointError(f"{name!r} is not a model: no such folder or file, and no hub id") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        if offline or isinstance(error, OfflineModeIsEnabled):
            reason = f"is not in the hub's cache{at} and the server is offline"
        else:
            reason = (
                f"is neither a local folder or file, nor in the hub's cache{at}, and the hub can't be reached"
            )
        raise CheckpointError(
            f"the model {name} {reason}: fetch it once with the network (`quire fetch {name}`), "
            "or name a local folder or GGUF file"
        ) from error
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"can't fetch the model {name} from the hub: {first_line}") from error
    return Path(folder)
