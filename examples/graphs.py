"""A captured CUDA graph is replayed after a pause as before it: no new capture.

    python examples/graphs.py    # on a GPU; needs PyTorch

A layer is captured, replayed, and the whole tenant is paused and resumed from inside. You see that the next replay gives
the same bytes, what the pause and the resume took, and what a new capture would have.
"""

import time

import stage


def main() -> None:
    stage.begin("infer")
    import sublet

    try:
        import torch
    except ImportError:
        stage.leave("needs PyTorch: pip install torch")
    if not torch.cuda.is_available():
        stage.leave("needs a GPU that PyTorch can use")
    torch.manual_seed(0)
    layer = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8))).cuda().half()
    taken = torch.randn(16, 4096, device="cuda").half()

    def capture() -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        with torch.no_grad():
            layer(taken)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                given = layer(taken)
        return graph, given

    def timed(what: str, act: object) -> object:
        began = time.monotonic()
        found = act()
        torch.cuda.synchronize()
        print(f"{what}: {1000 * (time.monotonic() - began):.1f} ms")
        return found

    graph, given = timed("capture", capture)
    graph.replay()
    expected = given.clone()
    timed("replay", graph.replay)
    began = time.monotonic()
    sublet.pause()
    sublet.resume()
    print(f"pause and resume: {1000 * (time.monotonic() - began):.1f} ms")
    timed("first replay after it", graph.replay)
    same = torch.equal(given, expected)
    print("the same bytes" if same else "OTHER bytes")
    timed("capture again", capture)
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
