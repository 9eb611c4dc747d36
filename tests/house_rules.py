"""Rules of the house that a program can check: words, names, spelling, import order, lengths."""

from __future__ import annotations

import ast
import dataclasses
import functools
import io
import itertools
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path

from tests.paths import ROOT

PACKAGE = "spell_jax"
OUTSIDE = ("launch", "benchmarks", "data_pipeline", "configs", "docs", "examples", "tests")
FOLDERS = (PACKAGE, *OUTSIDE)

# Rooms by floor, from the top. A module imports its own room and lower floors only.
FLOORS = (
    ("entry",),  # spell_jax/*.py, config.py apart
    ("trainer", "serving"),
    ("config",),
    ("algorithms",),
    ("question_sets",),
    ("evaluation",),
    ("reporting",),
    ("rollout",),
    ("selfplay",),
    ("sampler", "learner"),
    ("policy",),
    ("attention",),
    ("data",),
    ("runtime",),
)

LONGEST_FUNCTION = 80
LONGEST_MODULE = 600

# Most words of a kind that points back at a noun ("that of", "whose"), for each 1,000 words of a
# room's docstrings or comments, or of a page. Codebases that read easily have 1.0 to 2.7.
MOST_ANAPHORS = 2.5

OPENINGS = frozenset(["Of", "What", "Who", "Whose", "Where", "How", "Which", "That"])

# First words of functions' docstrings. A verb that is missing here is added.
_VERBS = """
    Adapt Add Admit Advance Answer Append Apply Arrange Ask Assert Assign Attend Average Begin
    Blame Block Bring Build Call Cast Change Check Choose Circle Classify Clear Close Cluster
    Collect Combine Compare Compile Compute Connect Convert Copy Count Cover Create Cut Decide
    Declare Decode Decrement Define Delete Dequantize Derive Describe Dispatch Divide Do Draw
    Embed Encode End Escape Estimate Evaluate Exchange Execute Explain Extend Extract Fail Feed
    Fetch Fill Filter Find Fine-tune Finish Fit Flip Flush Fold Format Free Gather Generate Get
    Give Go Group Grow Guard Halve Hand Hash Hide Import Index Initialize Insert Install
    Interpolate Interrupt Iterate Join Keep Kill Leave Let Limit Link List Load Locate Lock Log
    Look Lower Make Map Mark Mask Match Measure Merge Mix Mount Move Multiply Name Normalize
    Note Open Order Pack Package Pad Pair Parse Pass Perform Pick Pile Place Plan Play Plot Pop
    Prefill Prefix Prepare Press Print Project Propose Push Put Quantize Query Queue Quote Raise
    Read Rebuild Receive Record Refuse Register Reject Release Remove Rename Render Reorder
    Replace Reply Report Request Reshape Restore Resume Return Reward Rewrite Roll Rotate Round
    Run Sample Save Scan Score Select Send Separate Serialize Set Show Shrink Sleep Solve Sort
    Split Stack Start Store Stream Strip Submit Subtract Suggest Sum Summarize Take Tell Time
    Tokenize Trace Train Transpose Truncate Tune Turn Update Use Validate Wait Warn Weight Wrap
    Write Yield
"""
VERBS = frozenset(_VERBS.split())

# Pattern -> plain word. Matched whole and case-insensitively in docstrings, comments and Markdown.
PHRASES = {
    r"so many": "N, at most N, every N",
    r"(?:is|are) begun with": "uses, starts from",
    r"drawn|drew": "sampled, chosen, plotted",
    r"behind": "after",
    r"learn(?:ed|t) from": "trained on",
    r"of whom": "a relative clause with that",
    r"games?": "algorithm",
    r"anchored": "reads with a frozen reader",
}
# Text in which a phrase above is right, by file (a suffix of its path), or "" for every file.
ALLOWED: Mapping[str, tuple[str, ...]] = {}

# Words of names -> replacement. A name contains `log_prob` if `log` and `prob` follow each other.
NAMES = {
    "drawn": "sampled",
    "log_prob": "logprob",
    "log_probs": "logprobs",
    "last_reader": "last_query",
}
# Names that say that a thing was found, made or is another one, instead of what it is.
# fmt: off
PRONOUNS = frozenset([
    "added", "again", "asked", "both", "chosen", "done", "few", "found", "given", "kept",
    "known", "less", "made", "many", "more", "most", "near", "needed", "one", "other", "others",
    "own", "rest", "said", "seen", "some", "taken", "they", "these", "those", "told", "two",
    "wanted", "whole",
])
# fmt: on
# Names above that stay, by file: parameters that others pass by name, a flag, a key on disk.
ALLOWED_PRONOUNS: Mapping[str, tuple[str, ...]] = {
    "benchmarks/accelerator/command.py": ("again",),
    "spell_jax/runtime/files/workdir_lock.py": ("seen",),
    "spell_jax/selfplay/selection.py": ("asked", "wanted"),
}
_ISE = [
    "anonym",
    "author",
    "categor",
    "character",
    "custom",
    "emphas",
    "equal",
    "external",
    "factor",
    "final",
    "general",
    "global",
    "harmon",
    "initial",
    "internal",
    "item",
    "linear",
    "local",
    "material",
    "max",
    "maxim",
    "memo",
    "memor",
    "min",
    "minim",
    "modern",
    "normal",
    "optim",
    "organ",
    "parallel",
    "parametr",
    "penal",
    "pickl",
    "polar",
    "prior",
    "random",
    "real",
    "recogn",
    "regular",
    "scrutin",
    "serial",
    "sharp",
    "special",
    "stabil",
    "standard",
    "steril",
    "summar",
    "symbol",
    "synchron",
    "synthes",
    "token",
    "util",
    "vector",
    "visual",
    "quant",
]
_BRITISH = re.compile(
    rf"(?:de|re|un|non)?(?:{'|'.join(_ISE)})is(?:e|ed|es|er|ers|ing|able|ation|ations)"
    r"|(?:behavi|col|fav|flav|hon|lab|neighb|rum|vap)our\w*"
    r"|(?:centi|milli|kilo)?(?:cent|lit|fib|met|theat)re[ds]?"
    r"|(?:ana|cata|para)lys(?:e|ed|es|er|ers|ing)"
    r"|(?:label|model|travel|signal)l(?:ed|ing|er|ers)"
    r"|catalogues?|grey|defence|licence"
)
# Words that stand for a noun said before. Repeat the noun instead.
_ANAPHORS = re.compile(
    r"\b(?:(?:that|those|these|ones)\s+of|those\s+(?:from|in|it|that|they|which|who|with|without)"
    r"|the\s+(?:ones?|former|latter|others)|whose|of\s+(?:it|them|these|those))\b",
    re.IGNORECASE,
)
# Modules with readers that can run code in their input.
CODE_FORMATS = (
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "jax.experimental.serialize_executable",
    "joblib",
    "jsonpickle",
    "marshal",
    "multiprocessing.connection",
    "multiprocessing.managers",
    "pickle",
    "shelve",
)
CODE_READERS = (
    "eval",
    "exec",
    "multiprocessing.Manager",
    "pandas.eval",
    "pandas.read_pickle",
    "torch.load",
    "yaml.full_load",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
)
# Keywords of any function, with the values that forbid it.
CODE_KEYWORDS = {"allow_pickle": "False", "trust_remote_code": "False", "weights_only": "True"}
_SAFE_FORMATS = "JSON, safetensors, or bytes with their lengths: no reader runs code"
# Names of other libraries, spelled as they spell them.
FOREIGN_NAMES: Set[str] = frozenset()


@dataclasses.dataclass(frozen=True, order=True)
class Violation:
    """A place that breaks a rule.

    Attributes:
      path: path below the repository root.
      line: line number, from 1.
      rule: name of the rule.
      text: what was found, and the remedy.
    """

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Source:
    """A parsed Python file.

    Attributes:
      path: path below the repository root, with forward slashes.
      text: content.
      tree: syntax tree of `text`.
    """

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, path: str, text: str) -> Source:
        """Parse the content of a file."""
        return cls(path, text, ast.parse(text))

    @property
    def module(self) -> str:
        """Dotted name of the module."""
        return self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the syntax tree."""
        return list(ast.walk(self.tree))


# ------------------------------------------------------------------------------------------- Words


_Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def docstrings(source: Source) -> list[tuple[int, str]]:
    """List (line, text) of every docstring; strings after attributes are not docstrings."""
    blocks = []
    for node in source.nodes:
        if isinstance(node, _Definition) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            assert isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            blocks.append((first.lineno, str(first.value.value)))
    return blocks


@functools.cache
def comments(source: Source) -> list[tuple[int, str]]:
    """List (line, text) of blocks of comments; comments on consecutive lines are one block."""
    # Cached: two rules read the comments of all files.
    blocks: list[tuple[int, str]] = []
    block: list[str] = []
    start = end = 0
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if block and line != end + 1:
            blocks.append((start, "\n".join(block)))
            block = []
        if not block:
            start = line
        block.append(token.string.removeprefix("#").strip())
        end = line
    if block:
        blocks.append((start, "\n".join(block)))
    return blocks


def openings(source: Source) -> Iterator[Violation]:
    """Find docstrings that begin with a relative clause."""
    for line, text in docstrings(source):
        word = re.match(r"\W*(\w*)", text)
        if word and word[1] in OPENINGS:
            begin = " ".join(text.split())[:60]
            yield Violation(source.path, line, "opening", f"{begin!r}: begin with a noun or verb")


def moods(source: Source) -> Iterator[Violation]:
    """Find docstrings of functions that do not begin with an imperative verb.

    Properties have noun phrases, and tests state what holds.
    """
    for node in source.nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = {
            ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list
        }
        text = ast.get_docstring(node)
        is_free = decorators & {"property", "cached_property"} or node.name.startswith("test_")
        if text and not is_free and text.split()[0].strip(".,:;") not in VERBS:
            begin = text.splitlines()[0][:60]
            line = node.body[0].lineno
            yield Violation(source.path, line, "mood", f"{begin!r}: begin with an imperative verb")


def phrases(path: str, blocks: Iterable[tuple[int, str]]) -> Iterator[Violation]:
    """Find words of a private language in blocks of text, each (first line, text)."""
    allowed = [text for name, quotes in ALLOWED.items() if path.endswith(name) for text in quotes]
    for line, text in blocks:
        for quote in allowed:
            # Same length and same line breaks, so that line numbers stay right.
            blank = re.escape(quote).replace(r"\ ", r"\s+")
            text = re.sub(blank, lambda match: re.sub(r"\S", "_", match[0]), text)
        for pattern, instead in PHRASES.items():
            spaced = pattern.replace(" ", r"\s+")
            for match in re.finditer(rf"\b(?:{spaced})\b", text, re.IGNORECASE):
                at = line + text.count("\n", 0, match.start())
                word = " ".join(match[0].split())
                yield Violation(path, at, "phrase", f"{word!r}: say {instead}")


def _names(source: Source) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of names, attributes, arguments, keywords and definitions."""
    for node in source.nodes:
        line = getattr(node, "lineno", 1)
        match node:
            case ast.Name():
                yield line, node.id
            case ast.Attribute():
                yield line, node.attr
            case ast.arg() | ast.keyword() if node.arg:
                yield line, node.arg
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield line, node.name
            case ast.alias() if node.asname:
                yield line, node.asname


def words(name: str) -> list[str]:
    """Split a name into words in lower case, at underscores and capitals."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def names(source: Source) -> Iterator[Violation]:
    """Find old names, and names in British spelling, once per name and file."""
    checked_names: set[str] = set()
    for line, name in [(1, source.module.rpartition(".")[2]), *sorted(_names(source))]:
        if name in checked_names or name in FOREIGN_NAMES:
            continue
        checked_names.add(name)
        joined = f"_{'_'.join(words(name))}_"
        for old, new in NAMES.items():
            if f"_{old}_" in joined:
                yield Violation(source.path, line, "name", f"{name!r}: say {new}")
        if any(_BRITISH.fullmatch(word) for word in words(name)):
            yield Violation(source.path, line, "spelling", f"{name!r}: spell it as Americans do")


def pronouns(source: Source) -> Iterator[Violation]:
    """Find variables, parameters, fields and functions named by a pronoun or a participle."""
    # Python passes the operand of an operator by position, and calls it `other` everywhere.
    operands = {
        argument
        for node in source.nodes
        if isinstance(node, ast.FunctionDef) and re.fullmatch("__[a-z]+__", node.name)
        for argument in node.args.args
        if argument.arg == "other"
    }
    allowed = ALLOWED_PRONOUNS.get(source.path, ())
    for node in source.nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.ExceptHandler(name=str(name)):
                pass
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                pass
            case ast.arg(arg=name) if node not in operands:
                pass
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                pass
            case _:
                continue
        if name.lstrip("_") in PRONOUNS and name not in allowed:
            yield Violation(source.path, node.lineno, "pronoun", f"{name!r}: say what it is")


def unique_classes(sources: Sequence[Source]) -> Iterator[Violation]:
    """Find classes outside the tests that have the name of a class of an earlier module."""
    first_paths: dict[str, str] = {}
    for source in sorted(sources, key=lambda source: source.path):
        if source.path.startswith("tests/"):
            continue
        for node in source.nodes:
            if not isinstance(node, ast.ClassDef):
                continue
            first_path = first_paths.setdefault(node.name, source.path)
            if first_path != source.path:
                text = f"{node.name!r} is a class of {first_path}, too: say what this one is"
                yield Violation(source.path, node.lineno, "class", text)


Block = tuple[str, int, str]  # path, first line, text


def anaphor_rate(blocks: Sequence[Block]) -> float:
    """Return the anaphors in 1,000 words of text."""
    count = sum(len(_ANAPHORS.findall(text)) for _, _, text in blocks)
    return round(1000 * count / max(1, sum(len(text.split()) for _, _, text in blocks)), 1)


def anaphors(name: str, blocks: Sequence[Block]) -> Iterator[Violation]:
    """Find words that stand for a noun, in a text that has more than MOST_ANAPHORS.

    Args:
      name: what the blocks are, such as "docstrings of spell_jax/policy".
      blocks: the text, in parts.
    """
    places = [
        (path, line + text.count("\n", 0, match.start()), " ".join(match[0].split()))
        for path, line, text in blocks
        for match in _ANAPHORS.finditer(text)
    ]
    rate = anaphor_rate(blocks)
    # Two in a short text are no habit.
    if rate <= MOST_ANAPHORS or len(places) <= 2:
        return
    for path, line, words_text in places:
        limits = f"{rate} in 1,000 words of {name}, at most {MOST_ANAPHORS}"
        text = f"{words_text!r}: repeat the noun ({limits})"
        yield Violation(path, line, "anaphor", text)


def texts(sources: Sequence[Source], pages: Mapping[str, str]) -> dict[str, list[Block]]:
    """Group docstrings and comments by room, and pages by path: {name: blocks}."""
    groups: dict[str, list[Block]] = {path: [(path, 1, text)] for path, text in pages.items()}
    for source in sources:
        parts = source.path.split("/")
        folder = "/".join(parts[: 1 + (parts[0] == PACKAGE and len(parts) > 2)])
        for kind, find in {"docstrings": docstrings, "comments": comments}.items():
            blocks = [(source.path, line, text) for line, text in find(source)]
            groups.setdefault(f"{kind} of {folder}", []).extend(blocks)
    return groups


def faces(sources: Sequence[Source]) -> Iterator[Violation]:
    """Find packages with an __init__.py that does not say what they are, or says what is not so.

    Every package outside the tests has a docstring. The docstring of a room also has a list
    "Public names:" of names that exist, and a line "Must not import:" of rooms that it does not.
    """
    modules = {source.module: source for source in sources}
    graph = _graph(tuple(sources))
    for source in sources:
        if not source.path.endswith("__init__.py") or source.path.startswith("tests/"):
            continue
        text = ast.get_docstring(source.tree)
        if not text:
            yield Violation(source.path, 1, "face", "no docstring: say what the package is")
            continue
        if source.module.split(".")[0] != PACKAGE or len(source.module.split(".")) != 2:
            continue
        public, _, forbidden = text.partition("\nMust not import: ")
        if "\nPublic names:\n" not in public or not forbidden:
            remedy = "add 'Public names:' and 'Must not import:'"
            yield Violation(source.path, 1, "face", f"a room without its interface: {remedy}")
            continue
        for name in _public_names(public.partition("\nPublic names:\n")[2]):
            if not _exists(f"{source.module}.{name}", modules):
                yield Violation(source.path, 1, "face", f"{name!r}: is not a name of the room")
        imported_rooms = {
            room(target)
            for module, module_imports in graph.items()
            if f"{module}.".startswith(f"{source.module}.")
            for _, target in module_imports
        }
        for name in sorted(set(re.findall(r"`(\w+)`", forbidden))):
            if name in imported_rooms:
                yield Violation(source.path, 1, "face", f"{name!r}: the room does import it")
            if name not in (PACKAGE, *OUTSIDE, *itertools.chain.from_iterable(FLOORS)):
                yield Violation(source.path, 1, "face", f"{name!r}: is no room")


def _public_names(section: str) -> Iterator[str]:
    """Yield the names of a section "Public names:" with entries `name, name: text`."""
    for entry in re.split(r"\n(?=  \S)", section.strip("\n")):
        yield from re.split(r",\s+", entry.strip().partition(": ")[0])


def _exists(name: str, modules: Mapping[str, Source]) -> bool:
    """Return whether a dotted name is a module, or stands at the top level of one."""
    module, _, member = name.rpartition(".")
    if name in modules:
        return True
    if module not in modules:
        return False
    defined = set()
    for statement in modules[module].tree.body:
        defined.add(getattr(statement, "name", None))
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            bindings = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            defined |= {node.id for node in bindings if isinstance(node.ctx, ast.Store)}
    return member in defined


# ----------------------------------------------------------------------------------------- Imports


def imports(source: Source, modules: Set[str]) -> list[tuple[int, str]]:
    """Find the modules that a file imports, anywhere in the file.

    Args:
      source: the file.
      modules: dotted names of all known modules. A name imported from a package counts as a module
        if it is among them, and as its package otherwise.

    Returns:
      (line, module) in the order of lines. Modules that are not in `modules` are left out, except
      for packages of OUTSIDE.
    """
    imported_modules = []
    for node in source.nodes:
        if isinstance(node, ast.Import):
            imported_names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # The package links to these folders of the repository.
            base = re.sub(r"^spell_jax\.(?=(configs|launch)\b)", "", node.module or "")
            if node.level:
                package = source.module.split(".")
                if not source.path.endswith("/__init__.py"):
                    package.pop()
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, *filter(None, [base])])
            members = [f"{base}.{alias.name}" for alias in node.names]
            imported_names = [name if name in modules else base for name in members]
        else:
            continue
        module_names = [
            name for name in imported_names if name in modules or name.split(".")[0] in OUTSIDE
        ]
        imported_modules += [(node.lineno, name) for name in module_names]
    return sorted(imported_modules)


def room(module: str) -> str:
    """Return the room of a spell_jax module: its folder, "config", or "entry" for entry points."""
    parts = module.split(".")
    if len(parts) == 2 and parts[1] in ("config", "entry"):
        return parts[1]
    rooms = {name for floor in FLOORS for name in floor}
    return parts[1] if len(parts) > 1 and parts[1] in rooms else "entry"


def _floor(name: str) -> int:
    return next(i for i, floor in enumerate(FLOORS) if name in floor)


@functools.cache
def _graph(sources: tuple[Source, ...]) -> dict[str, list[tuple[int, str]]]:
    modules = {source.module for source in sources}
    return {source.module: imports(source, modules - {source.module}) for source in sources}


def uphill(sources: Sequence[Source]) -> Iterator[Violation]:
    """Find imports of spell_jax that lead to a higher floor, sideways, or out of the package."""
    paths = {source.module: source.path for source in sources}
    for module, module_imports in _graph(tuple(sources)).items():
        if module.split(".")[0] != PACKAGE:
            continue
        for line, target in module_imports:
            here, path = room(module), paths[module]
            if target.split(".")[0] in OUTSIDE:
                text = f"{target}: {PACKAGE} imports nothing from {target.split('.')[0]}"
                yield Violation(path, line, "import", text)
            elif _floor(there := room(target)) <= _floor(here) and there != here:
                yield Violation(path, line, "import", f"{target}: {there} is not below {here}")


def circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Find strongly connected components with more than one node, each sorted (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for successor in edges.get(node, ()):
            if successor not in index:
                visit(successor)
                low[node] = min(low[node], low[successor])
            elif successor in stack:
                low[node] = min(low[node], index[successor])
        if low[node] == index[node]:
            at = stack.index(node)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                components.append(sorted(component))

    for node in edges:
        if node not in index:
            visit(node)
    return sorted(components)


def circular(sources: Sequence[Source]) -> Iterator[Violation]:
    """Find modules that import each other, directly or through others."""
    paths = {source.module: source.path for source in sources}
    edges = {
        name: [target for _, target in module_imports]
        for name, module_imports in _graph(tuple(sources)).items()
    }
    for circle in circles(edges):
        yield Violation(paths[circle[0]], 1, "circle", " <-> ".join(circle))


def _origins(source: Source) -> dict[str, str]:
    """Return the dotted names that imported names stand for: np -> numpy, loads -> pickle.loads."""
    origins = {}
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                origins[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                origins[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return origins


def _in_code_format(name: str) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in CODE_FORMATS)


def code_readers(source: Source) -> Iterator[Violation]:
    """Find imports and calls that can run code in their input, except in tests (for attacks)."""
    if source.path.startswith("tests/"):
        return
    origins = _origins(source)
    for node in source.nodes:
        texts: list[str] = []
        if isinstance(node, ast.Import):
            texts += [alias.name for alias in node.names if _in_code_format(alias.name)]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            texts += [name for name in members if _in_code_format(name)]
        elif isinstance(node, ast.Call):
            first, *parts = ast.unparse(node.func).split(".")
            name = ".".join([origins.get(first, first), *parts])
            texts += [f"{name}()"] if name in CODE_READERS else []
            for keyword in node.keywords:
                value = ast.unparse(keyword.value)
                if CODE_KEYWORDS.get(keyword.arg or "", value) != value:
                    texts.append(f"{keyword.arg}={value}")
            if name in ("__import__", "importlib.import_module") and node.args:
                module = ast.unparse(node.args[0]).strip("'\"")
                texts += [module] if _in_code_format(module) else []
        for text in texts:
            remedy = f"{text!r} can run code that stands in its input: use {_SAFE_FORMATS}"
            yield Violation(source.path, getattr(node, "lineno", 1), "code", remedy)


# ----------------------------------------------------------------------------------------- Lengths


def lengths(source: Source) -> Iterator[Violation]:
    """Find functions and modules that are too long, except in tests."""
    if source.path.startswith("tests/"):
        return
    lines = source.text.count("\n")
    if lines > LONGEST_MODULE:
        text = f"module of {lines} lines: at most {LONGEST_MODULE}"
        yield Violation(source.path, 1, "length", text)
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if lines > LONGEST_FUNCTION:
                text = f"{node.name} has {lines} lines: at most {LONGEST_FUNCTION}"
                yield Violation(source.path, node.lineno, "length", text)


# -------------------------------------------------------------------------------------------- Tree


def files(root: Path = ROOT) -> list[str]:
    """List the paths below `root` of files that git does not ignore."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    process = subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True)
    return sorted({path for path in process.stdout.splitlines() if (root / path).is_file()})


def read(root: Path = ROOT) -> tuple[list[Source], dict[str, str]]:
    """Read a checkout.

    Returns:
      The Python files in FOLDERS, and the text of Markdown files by path.
    """
    paths = files(root)
    code = [p for p in paths if p.endswith(".py") and p.split("/")[0] in FOLDERS]
    sources = [Source.parse(path, (root / path).read_text(encoding="utf-8")) for path in code]
    pages = {p: (root / p).read_text(encoding="utf-8") for p in paths if p.endswith(".md")}
    return sources, pages


def check(sources: Sequence[Source], pages: Mapping[str, str]) -> list[Violation]:
    """Check all rules.

    Args:
      sources: Python files.
      pages: text of Markdown files by path.

    Returns:
      Violations in the order of files and lines.
    """
    violations: list[Violation] = [*uphill(sources), *circular(sources), *unique_classes(sources)]
    violations += faces(sources)
    for name, blocks in texts(sources, pages).items():
        violations += anaphors(name, blocks)
    for source in sources:
        violations += [*openings(source), *moods(source), *names(source), *pronouns(source)]
        violations += [*lengths(source), *code_readers(source)]
        if not source.path.endswith("tests/test_house.py"):
            violations += phrases(source.path, [*docstrings(source), *comments(source)])
    for path, text in pages.items():
        violations += phrases(path, [(1, text)])
    return sorted(violations)
