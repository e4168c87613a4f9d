// Kernels of two processes with a GPU each that wait for each other in memory that both map, without NCCL.
//
// Compiled by NVRTC or nvcc; nothing is included. Flags only grow, but for those of store and spin. A wait that takes
// longer than LIMIT_CYCLES gives up and sets *failed; what it waited for is wrong then, and is found to be so.

typedef unsigned long long u64;

#define LIMIT_CYCLES (60ll * 2000 * 1000 * 1000)

static __device__ unsigned seen(const unsigned* word) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

static __device__ void told(unsigned* word, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Waits until *word has come to at least `value`, as a difference of less than half the range.
static __device__ void wait_for(const unsigned* word, unsigned value, unsigned* failed) {
    const long long began = clock64();
    while (static_cast<int>(seen(word) - value) < 0) {
        if (clock64() - began > LIMIT_CYCLES) {
            *failed = 1;
            return;
        }
    }
}

// Blocks of one number of both processes are here. Flags of a block lie 128 bytes apart: no two blocks poll one line.
static __device__ void meet(unsigned* own, unsigned* peer, unsigned epoch, unsigned* failed) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        told(peer + blockIdx.x * 32, epoch);
        wait_for(own + blockIdx.x * 32, epoch, failed);
    }
    __syncthreads();
}

static __device__ u64 first() { return blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x; }
static __device__ u64 all() { return gridDim.x * static_cast<u64>(blockDim.x); }

// ---------------------------------------------------------------- one piece of work each

extern "C" __global__ void affine_u32(unsigned* data, unsigned mul, unsigned add, u64 count) {
    for (u64 i = first(); i < count; i += all()) data[i] = data[i] * mul + add;
}

extern "C" __global__ void add_u32(unsigned* out, const unsigned* a, const unsigned* b, u64 count) {
    // The peer's words are not to be found in a cache of this device.
    for (u64 i = first(); i < count; i += all()) out[i] = a[i] + __ldcv(b + i);
}

extern "C" __global__ void store_u32(unsigned* word, unsigned value) {
    if (first() == 0) {
        __threadfence_system();
        told(word, value);
    }
}

extern "C" __global__ void spin_until_nonzero(const unsigned* word) {
    if (first() == 0) {
        const long long began = clock64();
        while (seen(word) == 0) {
            if (clock64() - began > LIMIT_CYCLES) __trap();
        }
    }
}

// data[i] = i * mul + add.
extern "C" __global__ void ramp(unsigned* data, unsigned mul, unsigned add, u64 count) {
    for (u64 i = first(); i < count; i += all()) data[i] = static_cast<unsigned>(i) * mul + add;
}

// Counts the words that are not i * mul + add.
extern "C" __global__ void count_wrong(const unsigned* data, unsigned mul, unsigned add, u64 count, unsigned* wrong) {
    for (u64 i = first(); i < count; i += all()) {
        if (data[i] != static_cast<unsigned>(i) * mul + add) atomicAdd(wrong, 1u);
    }
}

// ---------------------------------------------------------------- sums over both processes

// Each process reads both inputs and writes its own output.
extern "C" __global__ void one_shot(const unsigned* own, const unsigned* peer, unsigned* out, unsigned* own_flags,
                                    unsigned* peer_flags, unsigned epoch, u64 count, unsigned* failed) {
    meet(own_flags, peer_flags, 2 * epoch - 1, failed);
    for (u64 i = first(); i < count; i += all()) out[i] = own[i] + __ldcv(peer + i);
    meet(own_flags, peer_flags, 2 * epoch, failed);
}

// Each process adds its half of the words, and writes it to both outputs.
extern "C" __global__ void two_shot(const unsigned* own, const unsigned* peer, unsigned* own_out, unsigned* peer_out,
                                    unsigned* own_flags, unsigned* peer_flags, unsigned epoch, unsigned rank, u64 count,
                                    unsigned* failed) {
    meet(own_flags, peer_flags, 2 * epoch - 1, failed);
    const u64 half = count / 2, begin = rank * half;
    for (u64 i = begin + first(); i < begin + half; i += all()) {
        const unsigned sum = own[i] + __ldcv(peer + i);
        own_out[i] = sum;
        peer_out[i] = sum;
    }
    meet(own_flags, peer_flags, 2 * epoch, failed);
}

// ---------------------------------------------------------------- tokens to the other process and back

// Where tokens of one step stand, in memory of the process that they go to. All zero before the step.
struct State {
    unsigned slots;        // given out to senders
    unsigned arrived;      // tokens that are here
    unsigned expected[2];  // by sender: how many it sends, and 1
    unsigned returned;     // of the tokens that this process sent
    unsigned unused[27];
};

// Which process a token goes to.
static __device__ unsigned target(unsigned token, unsigned step) { return (token * 7 + step + token / 5) & 1; }

// Sends every token of `tokens`, `words` words each, to a slot of its process's `received`, with where it came from; then
// waits until all that are sent here have arrived.
extern "C" __global__ void dispatch(const unsigned* tokens, unsigned* own_received, unsigned* peer_received,
                                    unsigned* own_sources, unsigned* peer_sources, State* own_state, State* peer_state,
                                    unsigned rank, unsigned step, unsigned token_count, unsigned words, unsigned* failed) {
    __shared__ unsigned slot;
    for (unsigned token = blockIdx.x; token < token_count; token += gridDim.x) {
        const bool is_own = target(token, step) == rank;
        State* state = is_own ? own_state : peer_state;
        if (threadIdx.x == 0) slot = atomicAdd_system(&state->slots, 1u);
        __syncthreads();
        unsigned* place = (is_own ? own_received : peer_received) + static_cast<u64>(slot) * words;
        for (unsigned i = threadIdx.x; i < words; i += blockDim.x) place[i] = tokens[static_cast<u64>(token) * words + i];
        if (threadIdx.x == 0) (is_own ? own_sources : peer_sources)[slot] = rank << 31 | token;
        __threadfence_system();
        __syncthreads();
        if (threadIdx.x == 0) atomicAdd_system(&state->arrived, 1u);
        __syncthreads();
    }
    if (threadIdx.x != 0) return;
    if (blockIdx.x == 0) {
        unsigned to_own = 0;
        for (unsigned token = 0; token < token_count; token++) to_own += target(token, step) == rank;
        told(&own_state->expected[rank], to_own + 1);
        told(&peer_state->expected[rank], token_count - to_own + 1);
    }
    wait_for(&own_state->expected[0], 1, failed);
    wait_for(&own_state->expected[1], 1, failed);
    wait_for(&own_state->arrived, seen(&own_state->expected[0]) + seen(&own_state->expected[1]) - 2, failed);
}

// Sends every token that is here back to its place in its sender's `combined`, each word as word * 3 + 1, and waits until
// all that this process sent are back. `next_state` is that of the step to come, which nobody uses yet.
extern "C" __global__ void combine(const unsigned* received, const unsigned* sources, unsigned* own_combined,
                                   unsigned* peer_combined, State* own_state, State* peer_state, State* next_state,
                                   unsigned* own_flags, unsigned* peer_flags, unsigned epoch, unsigned rank,
                                   unsigned token_count, unsigned words, unsigned* failed) {
    const unsigned here = seen(&own_state->expected[0]) + seen(&own_state->expected[1]) - 2;
    for (unsigned slot = blockIdx.x; slot < here; slot += gridDim.x) {
        const unsigned source = __ldcv(sources + slot), token = source & 0x7fffffffu;
        const bool is_own = source >> 31 == rank;
        unsigned* place = (is_own ? own_combined : peer_combined) + static_cast<u64>(token) * words;
        for (unsigned i = threadIdx.x; i < words; i += blockDim.x) {
            place[i] = __ldcv(received + static_cast<u64>(slot) * words + i) * 3 + 1;
        }
        __threadfence_system();
        __syncthreads();
        if (threadIdx.x == 0) atomicAdd_system(&(is_own ? own_state : peer_state)->returned, 1u);
    }
    if (threadIdx.x == 0) wait_for(&own_state->returned, token_count, failed);
    if (first() == 0) {
        for (unsigned i = 0; i < sizeof(State) / sizeof(unsigned); i++) reinterpret_cast<unsigned*>(next_state)[i] = 0;
    }
    meet(own_flags, peer_flags, epoch, failed);
}
