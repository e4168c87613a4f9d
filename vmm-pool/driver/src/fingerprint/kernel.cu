// Fingerprints of pieces of device memory: `mod.rs` next to this says what they are, and computes the same on the host.
//
// A block takes one piece. It reads the piece's address and size from its slot, which lies in pinned host memory, and
// writes the fingerprint there in their place. `kernel.ptx` is made of this file by `ptx.py`.

typedef unsigned long long u64;
typedef unsigned int u32;

struct __align__(16) Words {
    u64 low, high;
};

#define THREADS 256
#define IN_FLIGHT 4

// What a word is combined with depends on where it lies: its index times a step, and a key. The keys are the process's own.
#define STEP_A 0x9e3779b97f4a7c15ULL
#define STEP_B 0xc2b2ae3d27d4eb4fULL
#define STEP_C 0xd6e8feb86659fd93ULL
#define STEP_D 0xa0761d6478bd642fULL

struct Keys {
    u64 a, b, c, d;
};

__device__ static inline Words load(const Words *at) {
    Words words;
    asm("ld.global.nc.L1::no_allocate.v2.u64 {%0, %1}, [%2];" : "=l"(words.low), "=l"(words.high) : "l"(at));
    return words;
}

__device__ static inline u64 fold(u64 left, u64 right) {
    return (left * right) ^ __umul64hi(left, right);
}

__device__ static inline u64 finish(u64 sum, u64 size_bytes) {
    u64 mixed = sum + size_bytes * STEP_A;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ULL;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebULL;
    return mixed ^ (mixed >> 31);
}

__device__ static inline void absorb(Words words, u64 index, const Keys &keys, u64 &first, u64 &second, u64 &any) {
    first += fold(words.low ^ (index * STEP_A + keys.a), words.high ^ (index * STEP_B + keys.b));
    second += fold(words.high ^ (index * STEP_C + keys.c), words.low ^ (index * STEP_D + keys.d));
    any |= words.low | words.high;
}

extern "C" __global__ void __launch_bounds__(THREADS) sublet_fingerprint(Words *slots, const Keys keys) {
    __shared__ Words piece;
    __shared__ u64 firsts[THREADS / 32];
    __shared__ u64 seconds[THREADS / 32];
    const u32 thread = threadIdx.x;
    if (thread == 0) {
        piece = slots[blockIdx.x];
    }
    __syncthreads();
    const Words *words = (const Words *)piece.low;
    const u64 count = piece.high / sizeof(Words);
    u64 first = 0, second = 0, any = 0;
    u64 index = thread;
    for (; index + (IN_FLIGHT - 1) * THREADS < count; index += IN_FLIGHT * THREADS) {
        Words loaded[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            loaded[i] = load(words + index + i * THREADS);
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            absorb(loaded[i], index + i * THREADS, keys, first, second, any);
        }
    }
    for (; index < count; index += THREADS) {
        absorb(load(words + index), index, keys, first, second, any);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        first += __shfl_down_sync(0xffffffffu, first, distance);
        second += __shfl_down_sync(0xffffffffu, second, distance);
    }
    if (thread % 32 == 0) {
        firsts[thread / 32] = first;
        seconds[thread / 32] = second;
    }
    // It is a barrier too.
    const int is_filled = __syncthreads_or(any != 0);
    if (thread == 0) {
        Words print = {0, 0};
        if (is_filled) {
            for (int warp = 1; warp < THREADS / 32; warp++) {
                first += firsts[warp];
                second += seconds[warp];
            }
            print.low = finish(first, piece.high);
            print.high = finish(second, piece.high);
            print.low = print.low == 0 ? 1 : print.low;
        }
        slots[blockIdx.x] = print;
    }
}
