# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The live page follows runs that grow, stays quick with 10,000 samples, and is read by those it is for alone."""

import http.client
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from qarl_jax.observe import html_report, live
from qarl_jax.types import UserError
from tests.reference.pages import SAMPLES, browse, browser, said, sample, with_script, write_run


@pytest.fixture
def serve():
    """Starts servers of runs, and ends them with the test."""
    begun = []

    def start(*paths, kind=live.Server, **options):
        server = kind([str(path) for path in paths], **options)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        begun.append(server)
        return server

    yield start
    for server in begun:
        server.shutdown()
        server.server_close()


def get(server, path, **headers):
    """(status, body) of a request."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer, answer.read().decode()


def scripted(monkeypatch, script):
    """Every page that is served runs `script`, too."""
    real = html_report.page
    monkeypatch.setattr(html_report, "page", lambda names, data: with_script(real(names, data), script))


def test_it_sends_what_came_since_the_last_answer_and_samples_in_full(tmp_path, serve):
    run = write_run(tmp_path / "a", SAMPLES)
    server = serve(run)
    first = json.loads(get(server, "/data")[1])
    assert first["runs"][0]["metrics"]["steps"] == list(range(10))
    again = json.loads(get(server, f"/data?have={urllib.request.quote(json.dumps(first['have']))}")[1])
    assert set(again["runs"][0]) == {"name", "fresh", "written"}
    assert json.loads(get(server, "/sample?run=0&at=2")[1])["tokens"] == ["a", " b", " c", " d"]
    assert json.loads(get(server, "/find?q=wait")[1]) == [[1]]
    answer, page = get(server, "/")
    assert "connect-src 'self'" in page
    assert answer.headers["Cache-Control"] == "no-store"


def test_what_is_asked_wrongly_is_refused_in_a_line(tmp_path, serve):
    server = serve(write_run(tmp_path / "a", SAMPLES))
    for path in (
        "/sample?run=0&at=99",
        "/sample?run=7&at=0",
        "/sample?run=-1&at=-1",
        "/data?have=x",
        "/find",
        "/sample?at=0",
    ):
        answer, text = get(server, path)
        assert (answer.status, text) == (400, "No such thing."), path
    assert get(server, "/../../etc/passwd")[0].status == 404
    request = urllib.request.Request(server.url, data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(request, timeout=30)


def test_a_damaged_run_is_told_and_the_others_are_shown(tmp_path, serve):
    good, bad = write_run(tmp_path / "good"), write_run(tmp_path / "bad")
    (bad / "metrics.jsonl").write_text("{}\n{}\n")
    parts = json.loads(get(serve(good, bad), "/data")[1])["runs"]
    assert "metrics" in parts[0]
    assert "metrics.jsonl is damaged" in parts[1]["error"]


def test_on_this_machine_no_page_of_another_site_reads_it(tmp_path, serve):
    """A name that another site lets point at 127.0.0.1 is in the browser's Host."""
    server = serve(write_run(tmp_path / "a"))
    assert server.token is None
    assert get(server, "/data", Host="evil.example")[0].status == 403
    assert get(server, "/data", Host="localhost:80")[0].status == 200


def test_elsewhere_it_needs_the_token_of_its_address(tmp_path, serve):
    server = serve(write_run(tmp_path / "a"), host="0.0.0.0")
    assert len(server.token) == 32
    assert server.url.endswith(f"/?token={server.token}")
    assert get(server, "/")[0].status == get(server, "/data?token=x")[0].status == 403
    answer, _ = get(server, f"/?token={server.token}")
    cookie = answer.headers["Set-Cookie"]
    assert answer.status == 200
    assert "HttpOnly; SameSite=Strict" in cookie
    assert get(server, "/data", Cookie=cookie.split(";")[0])[0].status == 200
    assert get(server, "/data", Cookie="qarl_token=\xe9")[0].status == 403


def test_a_folder_of_runs_stands_for_its_runs(tmp_path):
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b")
    (tmp_path / "new").mkdir()
    found = live.folders([tmp_path / "runs", tmp_path / "new", tmp_path / "runs" / "a" / "metrics.jsonl"])
    assert [folder.name for folder in found] == ["a", "b", "new"]
    with pytest.raises(UserError, match="is not there"):
        live.folders([tmp_path / "nothing" / "here"])
    with pytest.raises(UserError, match=r"a_typo is not there: name the folder of a run"):
        live.folders([tmp_path / "a_typo"])


def test_a_port_that_is_taken_and_a_strange_host_are_one_sentence(tmp_path, serve):
    run = write_run(tmp_path / "a")
    port = serve(run).server_address[1]
    with pytest.raises(UserError, match="Choose another --port"):
        live.Server([run], port=port)
    with pytest.raises(UserError, match="Cannot listen on"):
        live.Server([run], host="192.0.2.1")


@pytest.mark.slow  # five seconds: a process
def test_watch_says_where_the_page_is(tmp_path):
    run = write_run(tmp_path / "a")
    command = [sys.executable, "-m", "qarl_jax", "watch", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("a: http://127.0.0.1:")
            page = urllib.request.urlopen(line.split()[1], timeout=30).read().decode()
            assert "<title>a · qarl_jax</title>" in page
        finally:
            process.terminate()
    assert live.main([str(tmp_path / "none" / "x")]) == 2


# ---- in a browser ----------------------------------------------------------------------------------------------------


class Growing(live.Server):
    """Before every answer one more step is trained."""

    def data(self, have):
        self.step = getattr(self, "step", 10)
        folder = self.runs[0].folder
        for name, record in (
            ("metrics", {"step": self.step, "reward/mean": 0.9, "time/step_s": 2.5, "time/rollout_s": 1.0}),
            ("samples", sample(self.step, ["new", f" {self.step}"], [0, 1])),
        ):
            with (folder / f"{name}.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        self.step += 1
        return super().data(have)


@pytest.mark.slow
@browser
def test_a_run_that_grows_is_followed_by_curves_and_samples_while_somebody_reads(tmp_path, serve, monkeypatch):
    script = """
      await until(() => runs.length && runs[0].steps.length >= 12);
      const out = {state: $("state").className, points: drawn[0].scale.lines.find(line => !line.marks).x.length};
      $("filter").focus(); set("filter", "rew");
      const steps = runs[0].steps.length;
      await until(() => runs[0].steps.length > steps);
      out.typed = [document.activeElement.id, $("filter").value, document.querySelectorAll("#charts figure").length];
      go("samples");
      await until(() => rows.length && detail);
      open(rows[rows.length - 1]);                      // the oldest
      await until(() => detail.row === rows[rows.length - 1]);
      $("list").scrollTop = 1e6;
      const read = selected, many = rows.length;
      await until(() => rows.length > many + 1);
      out.reading = [selected === read, rows[0].step > rows[rows.length - 1].step, detail.row === read];
      out.shown = tokenSpans().map(t => t.textContent);
      return out;"""
    scripted(monkeypatch, script)
    server = serve(write_run(tmp_path / "a", SAMPLES), kind=Growing)
    dom, console = browse(server.url, tmp_path, "--dump-dom", budget=30000)
    assert console == []
    out = said(dom)
    assert out["state"] == "live"
    assert out["points"] >= 12
    assert out["typed"] == ["filter", "rew", 3]
    assert out["reading"] == [True, True, True]
    assert out["shown"] in (["so", " we", " get", " 4", "<eos>"], ["wait", ",", " wait"])


@pytest.mark.slow
@browser
def test_ten_thousand_samples_are_listed_filtered_and_read_at_once(tmp_path, serve, monkeypatch):
    run = write_run(tmp_path / "a", steps=2500)
    with (run / "samples.jsonl").open("w") as file:
        for i in range(10_000):
            fates = [1 if i % 10 == 0 else 0] * 40
            record = sample(i // 4, [f"w{i}", *[" and"] * 39], fates, advantage=(-1.0) ** i, uid=f"task/{i % 50}")
            file.write(json.dumps(record) + "\n")
    script = """
      await until(() => runs.length && runs[0].samples.length === 10000);
      const out = {};
      const timed = async (name, act, done) => {  // the clock of the page runs ahead, that of the server does not
        await fetch(`/?begin=${name}`);
        act();
        await until(done);
        await fetch(`/?end=${name}`);
      };
      await timed("open", () => go("samples"), () => detail);
      out.count = $("count").textContent; out.nodes = document.querySelectorAll(".row").length;
      await timed("filter", () => set("fate", "above"), () => rows.length === 1000);
      await timed("sort", () => set("sort", "reward"), () => true);
      set("fate", "");
      await timed("search", () => set("query", "w7777"), () => rows.length === 1);
      await until(() => detail && detail.row === rows[0]);
      out.found = document.querySelector(".tokens .t").textContent;
      out.same = document.querySelectorAll(".same button").length;
      set("query", "");
      await until(() => rows.length === 10000);
      $("list").scrollTop = 54 * 9999; paint();
      out.end = [...document.querySelectorAll(".row")].at(-1).textContent; out.last = rows.at(-1).step;
      return out;"""
    scripted(monkeypatch, script)
    marks = {}

    def mark(self, format, request, *rest):
        marks[request.split()[1].removeprefix("/?")] = time.monotonic()

    monkeypatch.setattr(live.Handler, "log_message", mark)
    server = serve(run)
    dom, console = browse(server.url, tmp_path, "--dump-dom", budget=60000)
    assert console == []
    out = said(dom)
    assert out["count"] == "10000 of 10000 samples"
    assert out["nodes"] < 60
    assert (out["found"], out["same"]) == ("w7777", 30)
    assert f"step {out['last']}" in out["end"]
    took = {name: marks[f"end={name}"] - marks[f"begin={name}"] for name in ("open", "filter", "sort", "search")}
    assert max(took.values()) < 5, took  # some 0.1 s each on an idle core, the search 1 s
