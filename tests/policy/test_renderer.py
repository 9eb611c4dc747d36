"""Tests of the limits of chat templates: time, memory, output, and what a template can reach."""

import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from spell_jax.policy import renderer
from spell_jax.policy.chat import Template

SET = "{% set ns = namespace(x='ab') %}"
# Templates of a few dozen characters that would take minutes, or more memory than there is.
IN_MEMORY = {
    "repetition": "{{ 'a' * 10 ** 10 }}",
    "unrolled doublings": SET + "{% set ns.x = ns.x ~ ns.x %}" * 40 + "{{ ns.x }}",
    "doublings in a loop": SET + "{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "blocks": "{% set a = 'ab' %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 40,
    "a replacement": "{{ ('a' * 100000).replace('a', 'a' * 100000) }}",
    "a joint": "{{ range(99999) | join('a' * 100000) }}",
    "a method": "{{ 'a'.ljust(10 ** 10) }}",
    "a batch": "{{ 'a' | batch(10 ** 10, 'x') | list | length }}",
}
SLOW_IN_MEMORY = {
    "a format": "{{ '%0999999999d' | format(1) }}",
    "a width": "{{ 'a' | center(10 ** 9) }}",
    "an indent": "{{ 'a\nb' | indent(10 ** 9) }}",
    "JSON": "{{ [[[1]]] | tojson(indent=10 ** 9) }}",
    "a long text": "{{ '{:999999999}'.format(1) }}",
}
IN_TIME = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(40) }}",
    "a power": "{{ 10 ** (10 ** 9) > 0 }}",
    "a rounding": "{{ 1.5 | round(10 ** 8, 'ceil') }}",
    "shared lists": "{% set ns = namespace(x=[1]) %}"
    "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
}


@pytest.mark.parametrize("source", IN_MEMORY.values(), ids=IN_MEMORY)
def test_template_that_grows_is_refused_when_it_is_loaded(source: str) -> None:
    with pytest.raises(ValueError, match=r"here: a chat template without bounds .*1024 MiB"):
        Template(source, "here", {}, [])


@pytest.mark.slow
@pytest.mark.parametrize("source", SLOW_IN_MEMORY.values(), ids=SLOW_IN_MEMORY)
def test_template_that_grows_slowly_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"here: a chat template without bounds \((takes|writes)"):
        Template(source, "here", {}, [])


@pytest.mark.slow
@pytest.mark.parametrize("source", IN_TIME.values(), ids=IN_TIME)
def test_template_that_loops_is_refused(source: str, monkeypatch) -> None:
    monkeypatch.setattr(renderer, "SECONDS", 1)
    with pytest.raises(ValueError, match=r"here: a chat template without bounds .*1 s of CPU time"):
        Template(source, "here", {}, [])
    assert Template("a", "here", {}, []).parts("") == ["a"]  # by another child


def test_template_that_writes_more_than_a_multiple_of_the_messages_is_refused() -> None:
    source = "{{ messages[0].content * 10 }}"
    template = Template(source, "here", {}, [])
    assert template.parts("abc") == ["abc" * 10]
    with pytest.raises(ValueError, match=r"here: .*writes 10000000 characters, more than 50"):
        template.parts("a" * 1_000_000)


@pytest.mark.slow
def test_template_that_loops_for_one_content_only_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(renderer, "SECONDS", 1)
    source = "{% if messages[0].content == 'go' %}" + IN_TIME["loops"] + "{% endif %}ok"
    template = Template(source, "here", {}, [])
    assert template.parts("stay") == ["ok"]
    with pytest.raises(ValueError, match="here: a chat template without bounds"):
        template.parts("go")
    assert template.parts("stay") == ["ok"]


def test_template_that_refuses_short_chats_is_loaded() -> None:
    source = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}a"
    template = Template(source, "here", {}, [])
    assert template.parts([{"role": "system", "content": ""}]) == ["a"]
    with pytest.raises(ValueError, match=r"here: fails on these messages \(no system\)"):
        template.parts("")


@pytest.mark.parametrize(
    "source",
    [
        # The first two print the environment of their process in Jinja 3.1.5.
        "{{ ('{0.__init__.__globals__[os].environ}' | attr('format'))(cycler) }}",
        "{{ ('{0.__init__.__globals__}' | attr('format'))(cycler) }}",
        "{{ [cycler] | map('{0.__init__.__globals__}'.format) | list }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.environ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ '{0.__init__.__globals__}'.format(cycler) }}",
        "{{ self._TemplateReference__context.environment }}",
    ],
)
def test_template_reaches_no_environment(source: str, monkeypatch) -> None:
    monkeypatch.setenv("SPELL_JUDGE_KEY", "hidden-key")
    try:
        rendered = "".join(map(str, Template(source, "here", {}, []).parts("")))
    except ValueError as error:
        rendered = str(error)
    for word in ("hidden-key", "environ(", "__builtins__", "<class 'os"):
        assert word not in rendered


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="needs /proc")
def test_child_has_no_variables_of_this_process() -> None:
    Template("a", "here", {}, [])
    assert renderer._child is not None
    process = renderer._child._process
    assert pathlib.Path(f"/proc/{process.pid}/environ").read_bytes() == b""


def test_child_that_is_killed_is_replaced() -> None:
    template = Template("{{ messages[0].content }}", "here", {}, [])
    assert renderer._child is not None
    renderer._child._process.kill()
    renderer._child._process.wait()
    assert template.parts("a") == ["a"]
    renderer._child._process.kill()
    assert template.parts("\ud800 é ☃") == ["\ud800 é ☃"]  # a lone surrogate, too


def test_child_that_is_killed_twice_is_an_error(monkeypatch) -> None:
    template = Template("{{ messages[0].content }}", "here", {}, [])
    monkeypatch.setattr(renderer, "__file__", os.devnull)  # a program that ends at once
    monkeypatch.setattr(renderer, "_child", None)
    with pytest.raises(ValueError, match=r"here: .*ends its process with status 0"):
        template.parts("a")


@pytest.mark.skipif(not os.path.exists("/proc/self/limits"), reason="needs /proc")
def test_child_keeps_the_hard_limit_of_a_login_shell() -> None:
    program = (
        "import pathlib, resource; from spell_jax.policy import renderer\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))\n"
        "renderer.render('a', [], {})\n"
        "print(pathlib.Path(f'/proc/{renderer._child._process.pid}/limits').read_text())\n"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    [line] = [line for line in process.stdout.decode().splitlines() if "cpu time" in line]
    soft, hard = line.split()[3:5]
    assert int(soft) <= renderer.SECONDS + 2 and hard == "1000"


def test_threads_get_their_own_texts() -> None:
    template = Template("{{ messages[0].content }}", "here", {}, [])
    texts = [str(number) * 1000 for number in range(8)]
    rendered = {}

    def render(text: str) -> None:
        rendered[text] = [template.parts(text) for _ in range(20)]

    threads = [threading.Thread(target=render, args=[text]) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rendered == {text: [[text]] * 20 for text in texts}


@pytest.mark.slow
def test_child_costs_little_beside_tokenization() -> None:
    template = Template("{{ messages[0].content }}", "here", {}, [])
    text = "word " * 16_000
    template.parts(text)
    times = []
    for _ in range(9):
        began = time.perf_counter()
        template.parts(text)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.02  # 0.001 s on an idle machine


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_child_ends_with_a_process_that_is_killed() -> None:
    program = (
        "import time; from spell_jax.policy import renderer\n"
        "renderer.render('a', [], {})\n"
        "print(renderer._child._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        stat = pathlib.Path(f"/proc/{int(parent.stdout.readline())}/stat")
        assert stat.exists()
        parent.kill()
    for _ in range(100):
        # A child that nobody waits for stays as a zombie where process 1 does not reap.
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child runs on")
