"""The fields of a build of clusters with the paper's values (its Appendix E.1).

Not a build by itself: it has no sources. See folder.py, mixed.py and paper.py.
"""

from typing import Any

from ml_collections import ConfigDict


def get_config() -> Any:  # a ConfigDict, whose fields have no static types
    config: Any = ConfigDict()
    config.seed = 0
    config.sources = ConfigDict()  # name -> source()
    config.filter = _filter()
    config.dedup = _dedup()
    config.decontaminate = ConfigDict()
    config.decontaminate.benchmarks = ConfigDict()  # name -> benchmark()
    config.decontaminate.question_threshold = 0.8  # share of a question found in a document
    config.cut = _cut()
    config.embed = _embed()
    config.cluster = _cluster()
    config.tasks = ConfigDict()
    config.tasks.clusters_per_task = 0  # 0: as many as the task with the fewest has
    config.output = ConfigDict({"shards": 8})
    return config


def source(path: str, tasks: tuple[str, ...], **fields: Any) -> Any:
    """Files to read; data_pipeline/sources.py says what each field means."""
    result: Any = ConfigDict()
    result.path = path
    result.tasks = tasks
    result.layout = "folder"
    result.split = ""  # or "chapters"
    result.together = False  # True: a cluster is of one document's pieces
    result.max_characters = 0  # 0: as the filter has it
    result.update(fields)
    return result


def benchmark(path: str, documents: tuple[str, ...], questions: tuple[str, ...]) -> Any:
    """An evaluation set: the names of its fields that hold documents and questions."""
    return ConfigDict({"path": path, "document_fields": documents, "question_fields": questions})


def _filter() -> Any:
    config: Any = ConfigDict()
    config.min_quality = 1.0  # of documents that come with a score
    config.min_characters = 100
    config.max_characters = 32_768
    config.languages = ("en",)  # (): any
    config.predicate = ""  # "package.module:function", document -> bool
    return config


def _dedup() -> Any:
    """MinHash LSH; decontamination has the same signatures."""
    config: Any = ConfigDict()
    config.permutations = 128
    config.bands = 16
    config.threshold = 0.8  # Jaccard similarity of shingles
    config.shingle_words = 5
    config.largest_group = 64  # documents of a band that are compared with each other
    config.rounds = 8  # of connected components
    return config


def _cut() -> Any:
    config: Any = ConfigDict()
    config.tokenizer = ""  # the policy's folder; "": white-space words are counted
    config.max_document_tokens = 3200
    return config


def _embed() -> Any:
    config: Any = ConfigDict()
    config.method = "tfidf"  # or "policy"
    config.dimensions = 256
    config.folder = ""  # of method "policy", in Qwen3-Embedding's layout
    return config


def _cluster() -> Any:
    config: Any = ConfigDict()
    config.documents_per_cluster = 20
    config.min_documents = 5
    config.max_cluster_tokens = 14_000
    return config
