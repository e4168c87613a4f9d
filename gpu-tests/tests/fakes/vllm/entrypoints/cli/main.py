"""What stands in for `vllm serve`: answers completions of the model that it was given, as one text or as a stream."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import vllm

METRICS = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'


def option(name: str, usual: str = "") -> str:
    """What an option of the command line says."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else usual


class Server(BaseHTTPRequestHandler):
    def say(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        self.say(METRICS if self.path == "/metrics" else "")

    def do_POST(self) -> None:
        asked: Any = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        word = {"choices": [{"text": sys.argv[2]}]}
        if asked.get("stream"):
            self.say("".join(f"data: {json.dumps(word)}\n\n" for _ in range(asked["max_tokens"])) + "data: [DONE]\n\n")
        else:
            self.say(json.dumps(word))

    def log_message(self, *_what: Any) -> None:
        """Says nothing of requests."""


if __name__ == "__main__":
    tensor = int(option("--tensor-parallel-size", "1"))
    assert tensor == vllm.visible(), "all GPUs are used"
    held = vllm.hold(tensor)
    ThreadingHTTPServer(("127.0.0.1", int(option("--port"))), Server).serve_forever()
