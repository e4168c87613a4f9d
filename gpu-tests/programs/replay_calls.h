// What NCCL 2.28.9 asks of the driver for one communicator of two processes, which do an all-reduce and an all-to-all.
//
// Derived from the calls of both ranks of a PyTorch 2.11 job on two H200; both make the same calls. In this order:
//
// 1. a trial of host memory by cuMemCreate, given back; page-locked host memory
// 2. `channels`: three blocks a channel and two more, each created, reserved, mapped, opened to its device; no peer sees them
// 3. `ring`: all buffers, then all flags; then the two of each channel are exported, and those of the peer imported, in turn
// 4. `peer`: the same for the all-to-all
// 5. at the end its own memory of 3 and 4, though the peer has it mapped; then imports, in pairs from 3 and 4 in turn; then the
//    first block of each channel, from the first channel behind those that a ring lacks; then what is left, the last first
//
// Each release is retain, release, address range, unmap, release, free. Memory is uncompressed and may be reached by network
// cards (gpuDirectRDMACapable). Own reservations are aligned to the granularity; those for imports are not.
#ifndef REPLAY_CALLS_H
#define REPLAY_CALLS_H

#include <stddef.h>

enum { CHANNELS = 32, RING_CHANNELS = 24, PEER_CHANNELS = 32, BLOCKS_PER_CHANNEL = 3, FURTHER_BLOCKS = 2 };

#define MIB ((size_t)1 << 20)

enum group_name { IN_CHANNELS, RING_BUFFERS, RING_FLAGS, PEER_BUFFERS, PEER_FLAGS, GROUPS };

static const struct {
    const char *name;
    size_t bytes;
} groups[GROUPS] = {
    [IN_CHANNELS] = {"channels", 2 * MIB},     [RING_BUFFERS] = {"ring buffers", 10 * MIB},
    [RING_FLAGS] = {"ring flags", 2 * MIB},    [PEER_BUFFERS] = {"peer buffers", 10 * MIB},
    [PEER_FLAGS] = {"peer flags", 2 * MIB},
};

// Page-locked host memory of a communicator, all mapped into device addresses (CU_MEMHOSTALLOC_DEVICEMAP).
enum { HOST_DEVICEMAP = 2, HOST_BLOCKS = 4 };
static const size_t host_bytes[HOST_BLOCKS] = {4, 1 * MIB, 64 << 10, 64 << 10};

// Tensors of PyTorch, by cuMemAlloc.
enum { TENSORS = 3 };
static const size_t tensor_bytes[TENSORS] = {256 * MIB, 32 * MIB, 32 * MIB};

#endif
