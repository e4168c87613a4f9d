// A one-shot all-reduce of two processes, each with one GPU, over buffers of each other opened by cudaIpc.
//
// Every rank reads both inputs and writes its own output. Blocks of the same number meet before they read, so that the
// inputs are complete, and after it, so that nobody writes the next input too early. Flags only grow; a wait that takes
// longer than limit_cycles gives up and sets *failed.

#include <cuda_runtime.h>

namespace {

constexpr int BLOCKS = 32;
constexpr int THREADS = 512;

// Puts `epoch` into the peer's flag and waits until the peer has done so here.
__device__ void meet(unsigned* own, unsigned* peer, unsigned epoch, long long limit_cycles, int* failed) {
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("st.release.sys.global.u32 [%1], %0;" ::"r"(epoch), "l"(peer));
        const long long began = clock64();
        unsigned seen = 0;
        do {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(own));
            if (clock64() - began > limit_cycles) {
                *failed = 1;
                break;
            }
        } while (static_cast<int>(seen - epoch) < 0);
    }
    __syncthreads();
}

__global__ void one_shot(const float4* first, const float4* second, float4* output, unsigned* own_flags,
                         unsigned* peer_flags, unsigned epoch, int count, long long limit_cycles, int* failed) {
    // Flags of a block lie 128 bytes apart: no two blocks poll one line.
    unsigned* own = own_flags + blockIdx.x * 32;
    unsigned* peer = peer_flags + blockIdx.x * 32;
    meet(own, peer, 2 * epoch - 1, limit_cycles, failed);
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < count; i += BLOCKS * THREADS) {
        const float4 a = first[i], b = second[i];
        output[i] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
    }
    meet(own, peer, 2 * epoch, limit_cycles, failed);
}

}  // namespace

// `count` is in floats and a multiple of four; `epoch` begins at 1 and grows by 1 with every call on both ranks.
extern "C" int one_shot_all_reduce(const void* first, const void* second, void* output, void* own_flags,
                                   void* peer_flags, unsigned epoch, int count, int* failed, void* stream) {
    const long long limit_cycles = 20LL * 2000 * 1000 * 1000;
    one_shot<<<BLOCKS, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const float4*>(first), static_cast<const float4*>(second), static_cast<float4*>(output),
        static_cast<unsigned*>(own_flags), static_cast<unsigned*>(peer_flags), epoch, count / 4, limit_cycles, failed);
    return static_cast<int>(cudaGetLastError());
}

extern "C" int one_shot_flag_bytes(void) { return BLOCKS * 128; }
