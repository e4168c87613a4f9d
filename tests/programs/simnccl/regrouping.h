/* Communicators that lose ranks, and gain some. At the end of simnccl.c. */
#ifndef SUBLET_TEST_SIMNCCL_REGROUPING_H
#define SUBLET_TEST_SIMNCCL_REGROUPING_H

ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags)
{
    if (flags != 0 || alive(comm)->revoked)
        return ncclInvalidArgument;
    comm->revoked = true;
    abort_work(comm);
    return ncclSuccess;
}

static bool is_excluded(int rank, const int *excluded, int count)
{
    for (int i = 0; i < count; i++)
        if (excluded[i] == rank)
            return true;
    return false;
}

ncclResult_t ncclCommShrink(ncclComm_t parent, int *excluded, int excluded_count, ncclComm_t *made,
                            ncclConfig_t *config, int flags)
{
    int rank = 0, ranks = 0;
    (void)config;
    if ((flags & NCCL_SHRINK_ABORT) != 0)
        abort_work(alive(parent));
    for (int peer = 0; peer < alive(parent)->ranks; peer++) {
        if (is_excluded(peer, excluded, excluded_count))
            continue;
        rank += peer < parent->rank;
        ranks++;
    }
    uint64_t words[] = {parent->name, 1000 + parent->shrinks++};
    uint64_t name = hashed(14695981039346656037u, words, sizeof words);
    *made = new_communicator(name, rank, ranks, false);
    return do_for(made, 1, join_peers, *made);
}

static uint64_t grown_name(ncclComm_t parent)
{
    uint64_t words[] = {parent->name, 2000 + parent->grows};
    return hashed(14695981039346656037u, words, sizeof words);
}

ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *id)
{
    uint64_t name = grown_name(alive(comm));
    memset(id, 0, sizeof *id);
    memcpy(id->internal, &name, sizeof name);
    return ncclSuccess;
}

ncclResult_t ncclCommGrow(ncclComm_t parent, int ranks, const ncclUniqueId *id, int rank, ncclComm_t *made,
                          ncclConfig_t *config)
{
    uint64_t name = 0;
    (void)config;
    if (parent != NULL ? rank != -1 : id == NULL)
        return ncclInvalidArgument;
    if (parent != NULL) {
        name = grown_name(alive(parent));
        rank = parent->rank;
        parent->grows++;
    } else {
        memcpy(&name, id->internal, sizeof name);
    }
    *made = new_communicator(name, rank, ranks, false);
    return do_for(made, 1, join_peers, *made);
}

#endif
