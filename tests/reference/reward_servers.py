# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible endpoint on this machine, and a tiny reward model's folder."""

import collections
import contextlib
import http.server
import json
import pathlib
import threading

from qarl_jax import data

CHAT = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}"


class Endpoint(http.server.ThreadingHTTPServer):
    """Gives the score that a response names; `failures` are the status codes of the next requests.

    The next good ones get `choices`, where there are some."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies, self.keys, self.failures, self.choices = [], [], collections.deque(), collections.deque()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.keys.append(self.headers.get("Authorization"))
        self.server.bodies.append((self.path, body))
        code = self.server.failures.popleft() if self.server.failures else 200
        text = body["messages"][0]["content"]
        number = text.split("worth ")[1].split()[0] if "worth " in text else ""
        choice = {"message": {"content": f"Score: 1? No.\n**Score:** {number}"}}
        reply = {"choices": [self.server.choices.popleft() if code == 200 and self.server.choices else choice]}
        said = json.dumps(reply | {"usage": {"total_tokens": 10}} if code == 200 else {"error": "busy"}).encode()
        self.send_response(code)
        self.send_header("Retry-After", "0.01")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving():
    """A live `Endpoint`."""
    with Endpoint() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def reward_model(path: pathlib.Path, *, deviation: float = 0.5) -> pathlib.Path:
    """Writes a Qwen2 of two layers with a score at its last token; with deviation 0 it gives 0 to everything."""
    import torch
    import transformers

    tokenizer = data.make_char_tokenizer("abcdsu:+", path, chat_template=CHAT)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        num_labels=1,
        initializer_range=deviation,
        pad_token_id=0,
        **sizes,
    )
    torch.manual_seed(0)
    model = transformers.Qwen2ForSequenceClassification(config)
    if not deviation:
        torch.nn.init.zeros_(model.score.weight)
    model.save_pretrained(path)
    return path
