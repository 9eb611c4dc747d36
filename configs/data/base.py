"""Base config of data_pipeline.build: the paper's filters and sizes (Appendix E.1), in our limits.

The limits of tokens are ours, so that a cluster fits a prompt; paper.py is without them. The config
has no sources, so it cannot be built by itself. See folder.py, long.py, mixed.py and paper.py.
"""

from typing import Any

from ml_collections import ConfigDict


def get_config() -> Any:  # a ConfigDict; Any because its fields have no static types
    config: Any = ConfigDict()
    config.seed = 0
    config.sources = ConfigDict()  # name -> source()
    config.filter = _filter()
    config.dedup = _dedup()
    config.decontaminate = ConfigDict()
    config.decontaminate.benchmarks = ConfigDict()  # name -> benchmark()
    config.decontaminate.question_threshold = 0.8  # share of a question's shingles in a document
    config.cut = _cut()
    config.embed = _embed()
    config.cluster = _cluster()
    config.tasks = ConfigDict()
    config.tasks.clusters_per_task = 0  # 0: as many as all tasks can get
    config.tasks.tasks = ()  # (): the tasks of the sources
    config.output = ConfigDict({"shards": 8})
    return config


def source(path: str, tasks: tuple[str, ...], **fields: Any) -> Any:
    """Return the config of a source; SourceConfig in data_pipeline/sources.py has the fields."""
    result: Any = ConfigDict()
    result.path = path
    result.tasks = tasks
    result.layout = "folder"
    result.split = ""  # or "chapters"
    result.one_document_per_cluster = False
    result.max_report_tokens = 0  # above 0: a text is a report, its paragraphs are one cluster
    result.tfds_data_dir = ""  # of a path tfds:NAME[/CONFIG][:VERSION]; "": TFDS_DATA_DIR
    result.text_feature = ""  # of such a set; "": "text", or its only text
    result.tfds_split = ""  # of such a set, such as "train+test"; "": all
    result.max_characters = 0  # 0: use filter.max_characters
    result.update(fields)
    return result


def benchmark(path: str, documents: tuple[str, ...], questions: tuple[str, ...]) -> Any:
    """Return the config of a benchmark: its files, and their fields of documents and questions."""
    return ConfigDict({"path": path, "document_fields": documents, "question_fields": questions})


def _filter() -> Any:
    config: Any = ConfigDict()
    # Ultra-FineWeb's perfect score, and the paper's character limits (Appendix E.1).
    config.min_quality = 1.0  # ignored for documents without a score
    config.min_characters = 100
    config.max_characters = 32_768
    config.languages = ("en",)  # (): any
    config.predicate = ""  # "package.module:function", document -> bool
    return config


def _dedup() -> Any:
    """Return the settings of MinHash LSH; decontamination uses the same signatures."""
    config: Any = ConfigDict()
    config.permutations = 128
    # 16 bands of 8 rows: pairs at the threshold meet in a band with probability
    # 1 - (1 - .8^8)^16 = .95.
    config.bands = 16
    config.threshold = 0.8  # Jaccard similarity of shingles
    config.shingle_words = 5
    config.largest_group = 64  # largest band group in which all pairs are compared; bounds n^2 work
    config.rounds = 8  # iterations of the connected-components search
    return config


def _cut() -> Any:
    config: Any = ConfigDict()
    config.tokenizer = ""  # folder of the policy's tokenizer; "": count white-space separated words
    # Ours: 5 such documents, as many as the questioner reads, fit a prompt of 16,384 tokens.
    config.max_document_tokens = 3200
    return config


def _embed() -> Any:
    config: Any = ConfigDict()
    # The paper embeds with Qwen3-Embedding-8B (4,096 dimensions); the default needs no model.
    config.method = "tfidf"  # or "policy"
    config.dimensions = 256
    config.folder = ""  # model of method "policy", in Qwen3-Embedding's layout
    return config


def _cluster() -> Any:
    config: Any = ConfigDict()
    config.documents_per_cluster = 20  # the paper's average (Appendix E.1)
    config.min_documents = 5
    # Ours: a prompt of 16,384 tokens keeps 2,384 for its instructions and solved questions.
    config.max_cluster_tokens = 14_000
    return config
