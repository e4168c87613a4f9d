/* How ranks reach each other on the device. Each has 2 MiB of its own that all others map, and every
 * message is a rendezvous in the order of a stream:
 *
 *   sender    copies into its slot of the receiver's box, sets `full` there, waits for `taken` in its own
 *   receiver  waits for `full` in its own box, reads the slot, clears `full`, sets `taken` in the sender's
 *
 * So work of a stream keeps the device busy until the peers have launched theirs, and, since both flags are
 * cleared again, it can be replayed by a graph.
 */
#ifndef SUBLET_TEST_SIMNCCL_MAILBOX_H
#define SUBLET_TEST_SIMNCCL_MAILBOX_H

#include "bootstrap.h"

#include <stdbool.h>

#define HOST_NUMA 3
#define BOX_BYTES (2u << 20)
#define SLOT_BYTES (64u << 10)

/* Collectives, messages and exchanges do not meet in a slot. */
enum Channel { COLLECTIVE, MESSAGE, EXCHANGE, CHANNELS };

/* Signals of one rank to another that have been given and not waited for, at most. */
#define SIGNALS_MAX 64

enum {
    FLAGS_OFFSET = CHANNELS * RANKS_MAX * SLOT_BYTES,
    SIGNALS_OFFSET = FLAGS_OFFSET + 2 * CHANNELS * RANKS_MAX * 4,
    FLAGS_END = SIGNALS_OFFSET + RANKS_MAX * SIGNALS_MAX * 4,
    /* Where the owner of the box adds up what it has no other place for. */
    SCRATCH_OFFSET = FLAGS_OFFSET + SLOT_BYTES,
};
/* Words of a box in host memory that a thread of each rank counts in all the time, as NCCL's proxies do. */
enum { PROXY_OFFSET = BOX_BYTES - 4 * RANKS_MAX };
_Static_assert(FLAGS_END <= SCRATCH_OFFSET && SCRATCH_OFFSET + SLOT_BYTES <= PROXY_OFFSET, "the box is too small");

typedef struct {
    CUhandle handle;
    CUdeviceptr address;
} Box;

typedef struct {
    CUdeviceptr own;
    CUdeviceptr peer;
    CUstream stream;
    int own_rank, peer_rank;
    enum Channel channel;
} Road;

static CUdeviceptr slot(CUdeviceptr box, enum Channel channel, int from)
{
    return box + (CUdeviceptr)(channel * RANKS_MAX + from) * SLOT_BYTES;
}

static CUdeviceptr full_flag(CUdeviceptr box, enum Channel channel, int from)
{
    return box + FLAGS_OFFSET + 4 * (CUdeviceptr)(channel * RANKS_MAX + from);
}

static CUdeviceptr taken_flag(CUdeviceptr box, enum Channel channel, int by)
{
    return full_flag(box, channel, by) + 4 * CHANNELS * RANKS_MAX;
}

static CUdeviceptr signal_flag(CUdeviceptr box, int from, uint32_t number)
{
    return box + SIGNALS_OFFSET + 4 * (CUdeviceptr)((uint32_t)from * SIGNALS_MAX + number % SIGNALS_MAX);
}

static void set_flag(CUdeviceptr flag, uint32_t value, CUstream stream)
{
    void *params[] = {&flag, &value};
    driver_launch("store_u32", stream, params);
}

static void wait_and_clear(CUdeviceptr flag, CUstream stream)
{
    void *params[] = {&flag};
    driver_launch("spin_until_nonzero", stream, params);
    set_flag(flag, 0, stream);
}

static void put(Road road, CUdeviceptr data, size_t bytes)
{
    OK(cuMemcpyDtoDAsync(slot(road.peer, road.channel, road.own_rank), data, bytes, road.stream));
    set_flag(full_flag(road.peer, road.channel, road.own_rank), 1, road.stream);
}

/* Waits for what the peer puts; it lies in the slot until `let_go`. */
static CUdeviceptr wait_for_peer(Road road)
{
    wait_and_clear(full_flag(road.own, road.channel, road.peer_rank), road.stream);
    return slot(road.own, road.channel, road.peer_rank);
}

static void let_go(Road road)
{
    set_flag(taken_flag(road.peer, road.channel, road.own_rank), 1, road.stream);
}

static void wait_until_taken(Road road)
{
    wait_and_clear(taken_flag(road.own, road.channel, road.peer_rank), road.stream);
}

/* Are boxes in host memory, as NCCL's where devices do not reach each other? With SIMNCCL_HOST_BOXES. */
static bool boxes_are_in_host_memory(void)
{
    return getenv("SIMNCCL_HOST_BOXES") != NULL;
}

/* Maps a box where it was before, or at a new address. */
static void map_box(Box *box, int device)
{
    CUaccess access = {{1, device}, 3}, host_access = {{HOST_NUMA, 0}, 3};
    if (box->address == 0)
        OK(cuMemAddressReserve(&box->address, BOX_BYTES, 0, 0, 0));
    OK(cuMemMap(box->address, BOX_BYTES, 0, box->handle, 0));
    OK(cuMemSetAccess(box->address, BOX_BYTES, &access, 1));
    if (boxes_are_in_host_memory())
        OK(cuMemSetAccess(box->address, BOX_BYTES, &host_access, 1));
}

static void make_box(Box *box, int device)
{
    CUprop prop = driver_prop();
    prop.location = boxes_are_in_host_memory() ? (CUlocation){HOST_NUMA, 0} : (CUlocation){1, device};
    OK(cuMemCreate(&box->handle, BOX_BYTES, &prop, 0));
    map_box(box, device);
    /* Fills run on the default stream, and the host does not wait for them. */
    OK(cuMemsetD8(box->address, 0, BOX_BYTES));
    OK(cuStreamSynchronize(NULL));
}

/* Gives the memory up and keeps the address. */
static void suspend_box(Box *box)
{
    OK(cuMemUnmap(box->address, BOX_BYTES));
    OK(cuMemRelease(box->handle));
    box->handle = 0;
}

static void end_box(Box *box)
{
    if (box->handle != 0)
        suspend_box(box);
    OK(cuMemAddressFree(box->address, BOX_BYTES));
}

/* Sends a descriptor of the own box to every peer and maps theirs. */
static void exchange_boxes(uint64_t name, int listener, int own_rank, int ranks, int device, Box *boxes)
{
    for (int hop = 1; hop < ranks; hop++) {
        int fd = -1, peer = (own_rank + hop) % ranks;
        OK(cuMemExportToShareableHandle(&fd, boxes[own_rank].handle, CU_FD, 0));
        give_fd(name, own_rank, peer, fd);
        close(fd);
    }
    for (int count = 1; count < ranks; count++) {
        int peer = -1, fd = take_fd(listener, &peer);
        if (peer < 0 || peer >= ranks || peer == own_rank)
            stop("a descriptor came from rank %d", peer);
        OK(cuMemImportFromShareableHandle(&boxes[peer].handle, (void *)(intptr_t)fd, CU_FD));
        close(fd);
        map_box(&boxes[peer], device);
    }
}

#endif
