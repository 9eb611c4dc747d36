"""Model repositories of the Hugging Face Hub, named by hf://OWNER/NAME[@REVISION][/PATH].

`fetch` downloads a repository into huggingface_hub's own cache ($HF_HOME), which transformers and
vLLM share, with huggingface_hub's token ($HF_TOKEN, or `hf auth login`). Only the files that a
model is read from are downloaded. `push` writes a folder to a repository in one commit.

REVISION is a branch, a tag or a commit, by default `main`. A branch moves: `pin` replaces it by the
commit that it names now, so that all hosts of a run, and the run that resumes, read equal files.
"""

from __future__ import annotations

import dataclasses
import errno
import fnmatch
import logging
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any, TypeVar

from spell_jax.runtime.files.durable import SaveError
from spell_jax.runtime.urls import FetchError

T = TypeVar("T")
log = logging.getLogger(__name__)

_TARGET_FORM = "hf://OWNER/NAME"
FORM = f"{_TARGET_FORM}[@REVISION][/PATH]"
# Files of a model, besides its weights. Other formats of the weights (.bin, .gguf, .onnx, Mistral's
# consolidated.safetensors) are as large again, and not read.
_SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model", "merges.txt")
_WEIGHT_FILES = ("model*.safetensors", "adapter_model.safetensors")
# Files that weights.save, lora.save or Tokenizer.save may have written. One that is left of an
# earlier policy would be read as a part of the new policy.
POLICY_FILES = (
    *(*_WEIGHT_FILES, "model.safetensors.index.json", "adapter_config.json"),
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("tokenizer.model", "tokenization_sentencepiece_bpe.py", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
)
# An empty part, "." or ".." could name a file outside of the repository's folder.
_PART = r"(?!\.{1,2}(?:/|\Z))[^/\n]+"
# Pull requests have revisions with slashes.
_URL = re.compile(
    r"hf://(?P<name>[^/@\s]+/[^/@\s]+)(?:@(?P<revision>refs/pr/\d+|[^/@\s]+))?"
    rf"(?:/(?P<path>{_PART}(?:/{_PART})*))?/*"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Not models: fsspec reads them, with huggingface_hub.
_DATA = ("hf://datasets/", "hf://spaces/", "hf://buckets/")
_LOG_IN = "log in (hf auth login, or HF_TOKEN)"


@dataclasses.dataclass(frozen=True)
class Repository:
    """A repository, at one revision, and a path in it.

    Attributes:
      url: URL that names it.
      name: OWNER/NAME.
      revision: branch, tag or commit; "": the main branch.
      path: file or folder in the repository; "": all of it.
    """

    url: str
    name: str
    revision: str
    path: str

    @classmethod
    def parse(cls, url: str) -> Repository:
        """Parse a URL, without slashes at its end; ValueError if it has another form."""
        match = _URL.fullmatch(url)
        if not match:
            raise ValueError(f"{url}: must be {FORM}, where no part of PATH is empty, '.' or '..'")
        return cls(url.rstrip("/"), match["name"], match["revision"] or "", match["path"] or "")

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def download_hint(self) -> str:
        """Remedy for a machine without a network: the command that makes a local folder."""
        revision = f" --revision {self.revision}" if self.revision else ""
        return (
            f"or run `hf download {self.name}{revision} --local-dir DIR` where that works and name "
            "DIR instead of the URL, as in policy.folder=DIR"
        )


def is_model(url: str) -> bool:
    """Return whether a URL names a model of the Hub."""
    return url.startswith("hf://") and not url.startswith(_DATA)


def fetch(url: str, *, with_weights: bool = True) -> pathlib.Path:
    """Return the local path of a repository, or of a file or folder in it, downloaded if needed.

    Only files of a model in the folder itself are downloaded, none in folders below it; weights
    only `with_weights`. FetchError if the repository cannot be read, or has no weights although
    they are asked for; ImportError without huggingface_hub; ValueError for a URL of another form.
    """
    repository = Repository.parse(url)
    place = f"{repository.path}/" if repository.path else ""
    names = [f"{place}{name}" for name in _SMALL_FILES + _WEIGHT_FILES * with_weights]
    folder = _call(
        repository,
        lambda hub: hub.snapshot_download(
            repository.name,
            revision=repository.revision or None,
            # A path names a file or a folder; only the Hub knows which.
            allow_patterns=[*names, repository.path] if place else names,
            ignore_patterns=f"{place}*/*",  # which the patterns above match as well
        ),
    )
    snapshot = pathlib.Path(folder)
    path = snapshot / repository.path
    if not path.exists():
        raise FetchError(f"{url}: there is no such file or folder; check the name")
    if with_weights and path.is_dir() and not any(path.glob("*.safetensors")):
        raise FetchError(
            f"{url}: has no .safetensors files, which hold weights; choose another revision or "
            "repository"
        )
    log.info("%s: commit %s, in %s", url, snapshot.name, path)
    return path


def keep_commit(url: str, saved: str) -> str:
    """Return `saved`, the URL with which a run began, if it pins a commit of the same model.

    Otherwise, or if `url` names a commit itself, return `url`.
    """
    repository = Repository.parse(url)
    begun = Repository.parse(saved) if _URL.fullmatch(saved) else None
    same_place = begun and (begun.name, begun.path) == (repository.name, repository.path)
    if not begun or not same_place or not begun.is_pinned or repository.is_pinned:
        return url
    log.info("%s: stays at commit %s, with which the run began", url, begun.revision)
    return saved


def pin(url: str) -> str:
    """Return a repository's URL with the commit that its revision names now; errors as `fetch`."""
    repository = Repository.parse(url)
    if repository.is_pinned:
        return repository.url
    # The name of a snapshot is its commit, which the cache also knows without a network.
    place = fetch(repository.url, with_weights=False)
    depth = len(pathlib.PurePosixPath(repository.path).parts)
    commit = place.parents[depth - 1].name if depth else place.name
    path = f"/{repository.path}" if repository.path else ""
    return f"hf://{repository.name}@{commit}{path}"


def check_target(url: str) -> None:
    """Check, before the work, that `push` can take a URL and that the Hub accepts the user's token.

    ValueError if the URL is not hf://OWNER/NAME; FetchError if the Hub takes no such name, refuses
    the token or cannot be reached; ImportError without huggingface_hub.
    """
    match = _URL.fullmatch(url)
    if not match or match["revision"] or match["path"] or not is_model(url):
        raise ValueError(f"--push = {url!r}: must be {_TARGET_FORM}")
    repository = Repository.parse(url)

    def check(hub: Any) -> None:
        from huggingface_hub.utils import validate_repo_id

        validate_repo_id(repository.name)  # whoami does not see the name
        hub.HfApi().whoami()

    _call(repository, check, "written")


def push(folder: str | os.PathLike[str], url: str) -> str:
    """Write a local folder to a repository in one commit; return the commit's URL.

    A new repository is private. If the folder holds a model, POLICY_FILES that it lacks and an
    existing repository has, such as shards of older weights, are deleted in the same commit. All
    other files stay, and if the folder holds adapters alone, all files but the adapters stay.
    SaveError if the Hub refuses or cannot be reached: no file of the repository has changed then.
    """
    repository = Repository.parse(url)

    def upload(hub: Any) -> str:
        api = hub.HfApi()
        api.create_repo(repository.name, private=True, exist_ok=True)
        # Names instead of patterns, which would match files in folders below as well.
        present = [name for name in api.list_repo_files(repository.name) if "/" not in name]
        # Adapters may be pushed beside the weights of their base.
        patterns = POLICY_FILES if (pathlib.Path(folder) / "config.json").is_file() else ()
        commit = api.upload_folder(
            repo_id=repository.name,
            folder_path=folder,
            commit_message="Upload a policy of spell_jax",
            delete_patterns=[n for n in present if any(fnmatch.fnmatch(n, p) for p in patterns)],
        )
        return commit.commit_url

    try:
        return _call(repository, upload, "written")
    except FetchError as error:
        raise SaveError(
            f"{error}; nothing was pushed (`hf upload {repository.name} DIR` pushes a folder that "
            "--out has written)"
        ) from error


# ------------------------------------------------------------------------------------------ Errors


def _call(repository: Repository, call: Callable[[Any], T], verb: str = "read") -> T:
    """Call a function with huggingface_hub; FetchError explains a failure and has the remedy.

    `verb` says what the function does with the repository: "read" or "written".
    """
    try:
        # Imported here, because few commands need it.
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            f"{repository.url}: needs huggingface_hub; pip install huggingface_hub, "
            f"{repository.download_hint}"
        ) from error
    try:
        return call(huggingface_hub)
    except Exception as error:  # its own errors, and those of its HTTP client
        raise FetchError(f"{repository.url}: {_explain(repository, error, verb)}") from error


def _explain(repository: Repository, error: Exception, verb: str) -> str:
    from huggingface_hub import errors

    page = f"https://huggingface.co/{repository.name}"
    # huggingface_hub looks into its cache when the Hub fails; the reason is the failure.
    reason = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
    text = f"{type(reason or error).__name__}: {' '.join(str(reason or error).split())[:300]}"
    response: Any = getattr(error, "response", None)
    status = getattr(response, "status_code", 0)
    if isinstance(error, errors.GatedRepoError):
        return f"is gated; accept its terms at {page}, then {_LOG_IN}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no such repository, or it is private; check the name, or {_LOG_IN}"
    if isinstance(error, errors.RevisionNotFoundError):
        # The first slash ends a revision: of feature/x, only feature is looked for.
        hint = "; of a branch with slashes in its name, give the commit" if repository.path else ""
        return (
            f"has no revision {repository.revision or 'main'!r}; must be a branch, a tag or a "
            f"whole commit of {page}{hint}"
        )
    if isinstance(error, errors.LocalTokenNotFoundError):
        return f"cannot be {verb} without a token; {_LOG_IN}"
    if isinstance(error, errors.HFValidationError):
        return f"must be {FORM if verb == 'read' else _TARGET_FORM} ({text})"
    if status in (401, 403):
        return f"the access is refused ({text}); {_LOG_IN} as a user who may do this"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES):
        return f"its copy cannot be written ({text}); free some space, or set HF_HOME"
    # No network, a timeout, or a server that fails: huggingface_hub has tried the request again.
    remedy = f"try again, {repository.download_hint}" if verb == "read" else "try again"
    return f"the Hub cannot be reached, or fails ({text}); {remedy}"
