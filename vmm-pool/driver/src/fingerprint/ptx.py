"""Makes `kernel.ptx` of `kernel.cu`.

    pip download --no-deps nvidia-cuda-nvrtc-cu12==12.0.140    # unpack it; then
    python3 ptx.py path/to/libnvrtc.so.12

NVRTC 12.0 writes PTX 8.0, which every driver from 525 on compiles; virtual architecture 7.0 is the oldest that it is
for, and devices after it take it too.
"""

import ctypes
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
OPTIONS = [b"--gpu-architecture=compute_70", b"--std=c++17"]


def main() -> None:
    nvrtc = ctypes.CDLL(sys.argv[1])
    program = ctypes.c_void_p()
    source = (HERE / "kernel.cu").read_bytes()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None))
    options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
    compiled = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
    print(text(nvrtc, program, "ProgramLog"), end="")
    check(compiled)
    lines = text(nvrtc, program, "PTX").splitlines(keepends=True)
    # Tables of the compiler's own header, which nothing here reads.
    kept = [line for line in lines if "nv6target" not in line]
    (HERE / "kernel.ptx").write_text("".join(kept))


def text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    check(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.value.decode()


def check(code: int) -> None:
    if code != 0:
        sys.exit(f"NVRTC returned {code}")


main()
