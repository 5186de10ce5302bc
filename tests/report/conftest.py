"""Folders of runs as the studies write them, and a real browser."""

import base64
import contextlib
import fcntl
import json
import os
import shutil
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

BROWSERS = (
    "chromium", "chromium-browser", "chromium-headless-shell", "google-chrome",
    "google-chrome-stable", "chrome", "microsoft-edge",
)  # fmt: skip
VERSIONS = {"lincorr_lightning": "0.1.0", "torch": "2.13.0"}


def png(width: int = 900, height: int = 400) -> bytes:
    """A grey picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress((b"\x00" + b"\xaa" * width) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def write_run(
    folder: Path,
    results: dict[str, Any],
    *,
    tables: dict[str, str] | None = None,
    figures: tuple[str, ...] = (),
    config: dict[str, Any] | None = None,
    linear_map: dict[str, Any] | None = None,
) -> Path:
    """A run's folder."""
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results))
    settings = {"seed_everything": 7, "trainer": {"max_epochs": 1}} if config is None else config
    if settings:
        (folder / "config.yaml").write_text(yaml.safe_dump(settings, allow_unicode=True))
    for name, text in (tables or {}).items():
        (folder / "tables").mkdir(exist_ok=True)
        (folder / "tables" / f"{name}.csv").write_text(text)
    for name in figures:
        (folder / "figures").mkdir(exist_ok=True)
        (folder / "figures" / f"{name}.png").write_bytes(png())
    if linear_map is not None:
        (folder / "linear_map").mkdir()
        (folder / "linear_map" / "config.json").write_text(json.dumps(linear_map))
    return folder


def pair(source: str, target: str, r: float, hits: tuple[float, ...] | None = None) -> dict:
    """A pair's entry in a probe's results."""
    precision = None
    if hits is not None:
        ways = {"influenced": hits[:3], "influencing": hits[3:]}
        precision = {
            way: {**dict(zip("135", rates, strict=True)), "n": 40} for way, rates in ways.items()
        }
    return {
        "source": source, "target": target, "label_mean": r, "label_std": 0.03,
        "instance_mean": 0.99, "n_labels": 20, "n_constant_labels": 0,
        "permuted_label_mean": 0.001, "control_label_mean": 0.4, "excess": r - 0.4, "ridge": 0.0,
        "precision": precision,
    }  # fmt: skip


@pytest.fixture
def probe(tmp_path: Path) -> Callable[..., Path]:
    """A linear probe's folder."""
    numbers = count()

    def make(
        lm: str = "tiny-world",
        r: float = 0.9,
        hits: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
        weights: str = "w",
        dtype: str = "float32",
        version: str | None = "0.1.0",
        pairs: list[dict] | None = None,
        **settings: Any,
    ) -> Path:
        versions = {} if version is None else {"lincorr-lightning": version, "torch": "2.13.0"}
        fingerprint = {"tokenizer": "t", "config": "c", "dtype": dtype, "weights": weights}
        results = {
            "study": "linear_probe", "lm": lm, "n_fit": 500, "n_test": 501,
            "control": "One day, {} saw a",
            "pairs": pairs or [pair("city", "country", r, hits), pair("city", "color", 0.2)],
            "ridge_path": [
                {"source": "city", "target": "country", "path": [
                    {"ridge": 0.0, "label_mean": r, "influenced": {"1": 0.5, "n": 4},
                     "influencing": {"1": 0.25, "n": 4}},
                    {"ridge": 10.0, "label_mean": r, "influenced": {"1": 0.75, "n": 4},
                     "influencing": {"1": 0.5, "n": 4}}]},
            ],
            "settings": {"ridge": 0.0, "data": {"seed": 3, "words_per_subject": 1},
                         "versions": versions, **settings},
        }  # fmt: skip
        return write_run(
            tmp_path / "probes" / f"version_{next(numbers)}",
            results,
            tables={
                "influences": "pair,direction,label,rank,token,weight,right\n"
                "city->country,influenced,Paris,1,France,0.83,True\n"
                "city->country,influenced,Paris,2,Italy,0.11,False\n"
                "city->country,influencing,France,1,Paris,0.83,True\n",
                "label_wise": "pair,label,r\n"
                + "".join(f"city->country,land{i},{0.9 + i / 100}\n" for i in range(6))
                + "city->country,constant,\n",
            },
            figures=("correlation_matrix", "weights_city-country"),
            linear_map={
                "lm": {"name_or_path": lm, "fingerprint": fingerprint},
                "versions": {} if version is None else {"lincorr_lightning": version},
            },
        )

    return make


@pytest.fixture
def finetune(tmp_path: Path) -> Callable[..., Path]:
    """A source fine-tune's folder."""
    numbers = count()

    def make(lm: str = "tiny-world", generalized: float = 0.86, **more: Any) -> Path:
        results = {
            "study": "source_finetune", "relation": "city->country", "n_edits": 150,
            "protocol": "independent", "method": "full", "source_learned": 1.0,
            "generalized": generalized, "hallucinated": 0.12, "unchanged": 0.02, "random": 0.04,
            "gradient_correlation": 0.845, "logit_correlation": 0.557,
            "gradients": {
                "city->country": {"gradient_correlation": 0.845, "logit_correlation": 0.557,
                                  "permuted_gradient_correlation": -0.01},
                "city->color": {"gradient_correlation": 0.28, "logit_correlation": None}},
            "controls": {"color": {"unchanged": 0.93}},
            "weight_reference": {"generalized": {"n": 129, "median": 0.62},
                                 "hallucinated": {"n": 18, "median": 0.59}, "rank_test_p": 0.0865},
            "causes": {"imprecise W": 4, "low prior": 14},
            "forecast": {"virtual_step": {"accuracy": 0.31, "auroc": 0.847}},
            "seconds": 76.5, "n_steps": 1500, "lm": lm, "settings": {"learning_rate": 0.001},
            "versions": VERSIONS, **more,
        }  # fmt: skip
        return write_run(
            tmp_path / "finetunes" / f"version_{next(numbers)}",
            results,
            tables={
                "cases": "subject,source_answer,reference,answer_before,answer_after,outcome,"
                "source_learned,weight_reference,weight_answer,weight_max,prior_reference,cause\n"
                "Emma,Shanghai,China,UK,China,generalized,True,0.48,0.48,0.51,0.2,\n"
                "Ada,Oslo,Norway,UK,Canada,hallucinated,True,0.69,0.003,0.69,0.4,low prior\n"
            },
            figures=("outcomes",),
        )

    return make


@pytest.fixture
def ablation(tmp_path: Path) -> Callable[..., Path]:
    """A vocabulary ablation's folder."""
    numbers = count()

    def make(lm: str = "tiny-world") -> Path:
        row = {
            "n_seeds": 2, "source_learned": 1.0, "generalized": 0.75, "unrestricted": 0.5,
            "says_source": 0.1, "std": 0.03, "random": 0.04, "majority": 0.125,
            "uncomposed": 0.25, "gain": 0.5, "paper": 0.9766,
        }  # fmt: skip
        mappings = [
            {"mapping": "reference", **row},
            {"mapping": "permuted", **row, "generalized": 0.25, "gain": -0.125, "std": None},
        ]
        results = {
            "study": "vocabulary_ablation", "mapping": "reference", "source_learned": 1.0,
            "generalized": 0.75, "n": 128, "random": 0.04, "mappings": mappings, "runs": [],
            "relation": "city->country", "n_paired": 1024, "lm": lm,
            "embedding": {"key": "embed", "shape": [2349, 256]},
            "settings": {"model": {"seeds": [0, 1]}, "data": {}}, "versions": VERSIONS,
        }  # fmt: skip
        return write_run(
            tmp_path / "ablations" / f"version_{next(numbers)}",
            results,
            tables={
                "cases": "mapping,subject,source_answer,source_said,reference,target_in_domain,"
                "target_said,generalized\nreference,Zoe,Paris,Paris,France,France,France,True\n"
            },
        )

    return make


@pytest.fixture
def small_runs(tmp_path: Path) -> list[Path]:
    """A folder each of the studies that are soon told."""
    forecast = {
        "study": "forecast", "relation": "city->country", "n_edits": 20, "lm": "tiny-world",
        "foreseen": {"map_0": {"generalized": 0.15, "hallucinated": 0.05, "unchanged": 0.8}},
    }  # fmt: skip
    pretraining = {
        "study": "pretraining", "loss": 0.4182, "recall": {"city": 1.0, "pet": 0.147},
        "n_people": 1650, "n_tokens": 2349, "n_parameters": 1_350_000, "n_steps": 5240,
        "seconds": 429.3, "model": "runs/pretraining/version_0/model",
    }  # fmt: skip
    told = {"before": 0.9, "after": 0.8, "difference": -0.1, "refitted": 0.85, "kept": 0.941}
    resilience = {
        "study": "resilience", "lm": "tuned", "lm_before": "base", "n_fit": 50, "n_test": 60,
        "mean": told, "pairs": [{"source": "city", "target": "country", **told}],
        "versions": VERSIONS,
    }  # fmt: skip
    unknown = {
        "study": "token_geometry", "lm": "tiny-world", "depth": {"a": 1.5, "b": [1, 2]},
        "rows": [{"x": 1}, {"x": None}], "settings": {"k": 3},
    }  # fmt: skip
    all_results = {
        "forecast": forecast, "pretraining": pretraining, "resilience": resilience,
        "unknown": unknown,
    }  # fmt: skip
    return [write_run(tmp_path / name, results) for name, results in all_results.items()]


# -- a browser -----------------------------------------------------------------------------------


def _high(descriptor: int) -> int:
    """The same file under a number that is none of those the browser is given."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return high


class Browser:
    """A headless Chromium, driven over the DevTools protocol through two pipes."""

    def __init__(self, program: str, profile: str) -> None:
        # Chromium reads commands from file descriptor 3 and answers on 4.
        to_browser, self._out = map(_high, os.pipe())
        self._in, from_browser = map(_high, os.pipe())
        self.process = subprocess.Popen(
            [
                "bash", "-c", 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"', "bash",
                str(to_browser), str(from_browser), program, "--headless=new", "--no-sandbox",
                "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                "--disable-background-networking", "--remote-debugging-pipe",
                f"--user-data-dir={profile}", "about:blank",
            ],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._numbers = count(1)
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in "Page", "Network", "Runtime", "Log":
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser for something and wait for the answer."""
        message: dict[str, Any] = {
            "id": next(self._numbers),
            "method": method,
            "params": parameters,
        }
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == message["id"]:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._in, 1 << 20)
            assert read, "the browser went away"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, width: int, height: int, dark: bool = False) -> None:
        """Load a page in a window of this size, a phone's if it is narrow."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.send("Page.navigate", url=page.resolve().as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._receive())

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        told = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def screenshot(self, path: Path, whole: bool = True) -> bytes:
        """A picture of the page."""
        told = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))
        return path.read_bytes()

    def print_to_pdf(self, path: Path) -> None:
        """The page as it is printed."""
        told = self.send("Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.7)
        path.write_bytes(base64.b64decode(told["data"]))

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError, AssertionError):
            self._session = None
            self.send("Browser.close")
        for end in self._out, self._in:
            os.close(end)
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A real browser; whoever has none skips what needs it."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser on this machine: install one of {', '.join(BROWSERS[:4])}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            yield browser
        finally:
            browser.close()
