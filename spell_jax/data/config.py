"""The section `data` of a run's config, and the clusters that it names."""

from __future__ import annotations

import dataclasses
import logging
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from spell_jax.data import built, clusters, tiny_stories, tiny_world
from spell_jax.data.clusters import PAPER_TASKS, TASKS, Source
from spell_jax.data.tfds_sets import FORM, TfdsSource, is_tfds
from spell_jax.runtime import hooks
from spell_jax.runtime.config import LARGEST, check_choice, check_least, naming
from spell_jax.runtime.files import remote

log = logging.getLogger(__name__)

TASK_CHOICES = ("shares", "random")


class MakeClusters(Protocol):
    """A function that makes a generated world's clusters; data.source may name the user's own."""

    def __call__(
        self, seed: int, count: int, documents: Sequence[int], prefix: str, /
    ) -> list[clusters.Cluster]:
        """Make `count` clusters, the same for the same arguments.

        Args:
          seed: seed of the split: config.seed, or that plus HELD_OUT_SEED for held-out clusters.
          count: number of clusters, data.tiny.clusters.
          documents: numbers of documents of a cluster, data.tiny.documents, used in turn.
          prefix: beginning of the ids, "train" or "held_out".
        """
        ...


class World(NamedTuple):
    """A generated world: its clusters, and the most documents (or lines of a story) of one."""

    make_clusters: MakeClusters
    most_documents: int = LARGEST


# Worlds that data.source names with one word.
GENERATED = {
    "tiny": World(tiny_world.make_clusters, len(tiny_world.NAMES)),
    "tiny_stories": World(tiny_stories.make_stories, tiny_stories.MOST_LINES),
}
# Added to the run's seed for held-out clusters of a generated world. Far above usual seeds, so that
# no run trains on the held-out clusters of another run.
HELD_OUT_SEED = 10_000


@dataclasses.dataclass(frozen=True)
class TinyEvaluationConfig:
    """Sizes of the held-out evaluation in a generated world.

    algorithms/spell/evaluation.py has the measures in the tiny world.

    Attributes:
      seed: seed of all questions, different from the seed of the training clusters.
      per_cell: questions for each kind and number of documents, and questions to be written for
        each task; twice as many pairs of answers are to be judged.
      documents: numbers of documents that are read for an answer.
      quick_per_cell: per_cell of the validation during a run.
      quick_documents: documents of the validation during a run.
    """

    seed: int = 10_000
    per_cell: int = 128
    documents: tuple[int, ...] = (3, 8, 12, 16)
    quick_per_cell: int = 32
    quick_documents: tuple[int, ...] = (8, 12)

    def __post_init__(self):
        check_least(self, "data.tiny.evaluation.", per_cell=1, quick_per_cell=1)
        max_documents = len(tiny_world.NAMES)  # a two-hop question needs two documents
        for field in ("documents", "quick_documents"):
            counts = getattr(self, field)
            if not counts or not all(2 <= count <= max_documents for count in counts):
                raise ValueError(
                    f"data.tiny.evaluation.{field} = {counts}: each must be 2 to {max_documents}"
                )


@dataclasses.dataclass(frozen=True)
class TinyConfig:
    """Size of a generated world.

    Attributes:
      clusters: number of training clusters.
      documents: numbers of documents of a cluster, or of lines of a story, in equal shares.
      evaluation: sizes of the held-out evaluation.
    """

    clusters: int = 768
    documents: tuple[int, ...] = (8, 12)
    evaluation: TinyEvaluationConfig = TinyEvaluationConfig()


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Document clusters, or given questions, and the tasks they are used for.

    Files and folders may be URLs (docs/launching.md, "Data and weights from a bucket").

    Attributes:
      source: "tiny" or "tiny_stories" (generated worlds), `MODULE:FUNCTION`, a world of your own
        (a MakeClusters), a folder of .txt and .md files, a .jsonl, a folder that data_pipeline
        built, or `tfds:NAME[/CONFIG][:VERSION]`, a prepared tensorflow-datasets set. A built folder
        keeps its clusters and tasks.
      tfds_data_dir: directory of prepared sets, local or gs://; "" for the environment's
        TFDS_DATA_DIR, else ~/tensorflow_datasets.
      text_feature: feature of a set with the text of a document; "" for "text" or its only text.
      tfds_split: splits of a set in TFDS's notation, such as "train[:10%]+test"; "" for all.
      grouping: "similarity" or "order": how documents of a folder or set become clusters.
      documents_per_cluster: documents in a cluster of a folder or set.
      max_document_tokens: longest document, in tokens; longer ones are cut.
      held_out: share of clusters that training never sees, in [0, 1) [paper: none].
      questions: .jsonl of {"task", "documents", "question", "answer"} to train on, for algorithms
        that take given questions.
      shuffle: whether clusters, or given questions, are dealt in a random order, new in every
        epoch; else in the order of their source.
      validation: .jsonl of such questions for held-out evaluation.
      tasks: tasks of the run, of TASKS.
      task_weights: positive sampling weight of each task.
      task_choice: tasks of a batch: "shares" (by weight, rounded, as in the paper's code) or
        "random" (the task of each cluster is sampled by weight, paper section 4.1).
      tiny: size of the generated world, for a generated source.
    """

    source: str = ""
    tfds_data_dir: str = ""
    text_feature: str = ""
    tfds_split: str = ""
    grouping: str = "similarity"
    documents_per_cluster: int = 20
    max_document_tokens: int = 3200
    held_out: float = 0.0
    questions: str = ""
    shuffle: bool = True
    validation: str = ""
    tasks: tuple[str, ...] = PAPER_TASKS
    task_weights: tuple[float, ...] = (1.0, 1.0, 1.0)
    task_choice: str = "shares"
    tiny: TinyConfig = TinyConfig()

    def check(self) -> None:
        """Check the section. A ValueError names the field, its value and the remedy."""
        # No __post_init__, because a default DataConfig names no data.
        for field in ("questions", "validation"):
            path = getattr(self, field)
            if path and not (file := self._fetch(field)).is_file():
                reason = "is a folder" if file.is_dir() else "no such file"
                raise ValueError(
                    f"data.{field} = {path!r}: {reason}; must be a .jsonl of questions"
                )
        if not self.tasks or len({*self.tasks}) != len(self.tasks) or {*self.tasks} - {*TASKS}:
            raise ValueError(f"data.tasks = {self.tasks}: must be one or more of {TASKS}")
        weights = self.task_weights
        if len(weights) != len(self.tasks) or not all(0 < w < math.inf for w in weights):
            raise ValueError(f"data.task_weights = {weights}: must be a positive number per task")
        check_choice(self, "data.", task_choice=TASK_CHOICES)
        if not self.questions:
            self._check_source()

    def _fetch(self, field: str) -> pathlib.Path:
        path = getattr(self, field)
        with naming(f"data.{field}", path):
            return remote.fetch(path)

    def _check_source(self) -> None:
        source = self.source
        if is_tfds(source):
            self._check_set()
        elif is_generated(source):
            self._check_generated(find_world(source))
        elif not (source and self._fetch("source").exists()):
            is_path = "/" in source or pathlib.PurePath(source).suffix
            reason = "no such file or folder; " if is_path else ""
            raise ValueError(
                f"data.source = {source!r}: {reason}must be {', '.join(map(repr, GENERATED))}, "
                f"{hooks.FORM}, a folder of .txt/.md files, a .jsonl, {FORM}, or a folder that "
                "data_pipeline built"
            )
        if not 0 <= self.held_out < 1:
            raise ValueError(f"data.held_out = {self.held_out}: must be at least 0 and below 1")
        check_choice(self, "data.", grouping=clusters.GROUPINGS)
        smallest = clusters.SMALLEST_LIMIT
        check_least(self, "data.", documents_per_cluster=1, max_document_tokens=smallest)

    def _check_set(self) -> None:
        """Check that the set is prepared, and that its text feature and splits exist."""
        with naming("data.source", self.source):
            source = origin(self)
            if isinstance(source, TfdsSource) and not built.is_built(source):
                source.open()

    def _check_generated(self, world: World) -> None:
        if self.validation and self.source in GENERATED:
            raise ValueError(
                f"data.validation = {self.validation!r}: must be '' for data.source = "
                f"{self.source!r}, which makes its own questions"
            )
        check_least(self.tiny, "data.tiny.", clusters=1)
        documents = self.tiny.documents
        if not documents or not all(1 <= count <= world.most_documents for count in documents):
            raise ValueError(
                f"data.tiny.documents = {documents}: each must be 1 to {world.most_documents}"
            )


def origin(data: DataConfig) -> Source:
    """Return the path or URL of the section's source, or the tfds set that it names."""
    if not is_tfds(data.source):
        return data.source
    return TfdsSource(data.source, data.tfds_data_dir, data.text_feature, data.tfds_split)


def is_generated(source: str) -> bool:
    """Return whether data.source names a function that makes the clusters."""
    # A set, "tfds:NAME", has the form of a hook.
    return source in GENERATED or (hooks.is_hook(source) and not is_tfds(source))


def find_world(source: str) -> World:
    """Return the generated world that data.source names; ValueError if it is not importable."""
    return GENERATED.get(source) or World(hooks.load("data.source", source))


def open_clusters(
    data: DataConfig, seed: int, count_tokens: Callable[[str], int], prompt_cap: int = 0
) -> tuple[clusters.ClusterSource, clusters.ClusterSource]:
    """Return the training and the held-out clusters. Hosts share the reading of a built source.

    With a `prompt_cap` (tokens), warn if the documents of some clusters together exceed the cap.
    """
    if is_generated(data.source):
        make = find_world(data.source).make_clusters
        counts = data.tiny.clusters, data.tiny.documents
        train = make(seed, *counts, "train")
        held_out = make(seed + HELD_OUT_SEED, *counts, "held_out")
        return clusters.in_memory(train), clusters.in_memory(held_out)
    source = built.open_source(
        origin(data),
        count_tokens=count_tokens,
        max_document_tokens=data.max_document_tokens,
        documents_per_cluster=data.documents_per_cluster,
        grouping=data.grouping,
    )
    # Before share_reading: each host reads the sampled clusters itself, because launch.check has no
    # devices to exchange texts with.
    if prompt_cap:
        _warn_of_misfit(source, count_tokens, prompt_cap)
    if built.is_built(origin(data)):
        source = built.share_reading(source)
    train, held_out = clusters.split_held_out(list(source.tasks), data.held_out)
    log.info("%d clusters to train on, %d held out", len(train), len(held_out))
    return source.only(train), source.only(held_out)


# Clusters with tokens counted at the start. Counting a whole corpus would delay it.
_SAMPLED = 12


def _warn_of_misfit(
    source: clusters.ClusterSource, count_tokens: Callable[[str], int], prompt_cap: int
) -> None:
    """Warn if the documents of some of the _SAMPLED clusters together do not fit one prompt."""
    # At even distances, so that the sample covers the whole source.
    names = sorted(source.tasks)
    sampled = source.read(names[:: max(1, len(names) // _SAMPLED)][:_SAMPLED])
    sizes = [sum(map(count_tokens, cluster.documents)) for cluster in sampled]
    over = [size for size in sizes if size > prompt_cap]
    if over:
        log.warning(
            "%d of %d sampled clusters have more tokens (median %d) than a prompt may have (%d): "
            "questions about them are over-long and not trained on. Raise sampler.max_prompt, or "
            "lower data.documents_per_cluster or data.max_document_tokens (of a folder that "
            "data_pipeline built: the run's max_prompt in --config=configs/data/folder.py:PATH:"
            "MAX_PROMPT)",
            *(len(over), len(sizes), statistics.median(over), prompt_cap),
        )
