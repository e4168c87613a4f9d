/* Work of calls on a device. In the middle of simnccl.c. */
#ifndef SUBLET_TEST_SIMNCCL_RUNNING_H
#define SUBLET_TEST_SIMNCCL_RUNNING_H

static Road road_to(const Call *call, int peer, enum Channel channel)
{
    ncclComm_t comm = call->comm;
    return (Road){.own = comm->boxes[comm->rank].address,
                  .peer = comm->boxes[peer].address,
                  .stream = call->stream,
                  .own_rank = comm->rank,
                  .peer_rank = peer,
                  .channel = channel};
}

static void copy(CUdeviceptr to, CUdeviceptr from, const Call *call)
{
    if (to != from)
        OK(cuMemcpyDtoDAsync(to, from, call->bytes, call->stream));
}

static void run_sum(const Call *call, enum Channel channel)
{
    ncclComm_t comm = call->comm;
    uint64_t count = call->bytes / 4;
    for (int hop = 1; hop < comm->ranks; hop++)
        put(road_to(call, (comm->rank + hop) % comm->ranks, channel), call->from, call->bytes);
    copy(call->to, call->from, call);
    for (int hop = 1; hop < comm->ranks; hop++) {
        Road road = road_to(call, (comm->rank + hop) % comm->ranks, channel);
        CUdeviceptr target = call->to, other = wait_for_peer(road);
        void *params[] = {&target, &target, &other, &count};
        driver_launch("add_u32", call->stream, params);
        let_go(road);
    }
    for (int hop = 1; hop < comm->ranks; hop++)
        wait_until_taken(road_to(call, (comm->rank + hop) % comm->ranks, channel));
}

static void run_broadcast(const Call *call)
{
    ncclComm_t comm = call->comm;
    if (comm->rank != call->peer) {
        Road road = road_to(call, call->peer, COLLECTIVE);
        copy(call->to, wait_for_peer(road), call);
        let_go(road);
        return;
    }
    copy(call->to, call->from, call);
    for (int hop = 1; hop < comm->ranks; hop++)
        put(road_to(call, (comm->rank + hop) % comm->ranks, COLLECTIVE), call->from, call->bytes);
    for (int hop = 1; hop < comm->ranks; hop++)
        wait_until_taken(road_to(call, (comm->rank + hop) % comm->ranks, COLLECTIVE));
}

/* A message to oneself: the group's send to this rank, for its receive. */
static void receive_from_self(const Call *receive)
{
    for (int i = 0; i < group.count; i++) {
        const Call *send = &group.calls[i];
        if (send->kind == SEND && send->comm == receive->comm && send->peer == receive->comm->rank)
            copy(receive->to, send->from, receive);
    }
}

/* All messages of one round: no pair has two of them in one direction, so all can be put before any is
 * waited for. */
static void run_messages(int round)
{
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < group.count; i++) {
            const Call *call = &group.calls[i];
            if ((call->kind != SEND && call->kind != RECEIVE) || call->round != round)
                continue;
            if (call->peer == call->comm->rank) {
                if (step == 1 && call->kind == RECEIVE)
                    receive_from_self(call);
                continue;
            }
            Road road = road_to(call, call->peer, MESSAGE);
            if (step == 0 && call->kind == SEND)
                put(road, call->from, call->bytes);
            if (step == 1 && call->kind == RECEIVE) {
                copy(call->to, wait_for_peer(road), call);
                let_go(road);
            }
            if (step == 2 && call->kind == SEND)
                wait_until_taken(road);
        }
    }
}

/* Messages of one pair in one direction keep their order: each has a round of its own. */
static int number_rounds(void)
{
    int rounds = 0;
    for (int i = 0; i < group.count; i++) {
        Call *call = &group.calls[i];
        if (call->kind != SEND && call->kind != RECEIVE)
            continue;
        call->round = 0;
        for (int before = 0; before < i; before++) {
            const Call *other = &group.calls[before];
            call->round += other->kind == call->kind && other->comm == call->comm && other->peer == call->peer;
        }
        if (call->round >= rounds)
            rounds = call->round + 1;
    }
    return rounds;
}

static void run_signal(const Call *call)
{
    ncclComm_t comm = call->comm;
    set_flag(signal_flag(comm->boxes[call->peer].address, comm->rank, comm->given[call->peer]++), 1, call->stream);
}

static void run_wait(const Call *call)
{
    ncclComm_t comm = call->comm;
    CUdeviceptr own = comm->boxes[comm->rank].address;
    for (int i = 0; i < call->round; i++)
        wait_and_clear(signal_flag(own, call->peer, comm->awaited[call->peer]++), call->stream);
}

#endif
