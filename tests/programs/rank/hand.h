/* Commands by which a test interferes with a rank: frees, forged tickets, calls of Sublet's own. Each answers
 * `ok ...`, or `no ...` with the driver's word when it was refused and the rank lives on. */
#ifndef SUBLET_TEST_RANK_HAND_H
#define SUBLET_TEST_RANK_HAND_H

#include "work.h"

static CUgraph recorded;

__attribute__((format(printf, 1, 2))) static void answer(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    putchar('\n');
    fflush(stdout);
}

static void answer_code(CUresult code)
{
    if (code == CU_OK)
        answer("ok");
    else
        answer("no %s", driver_error(code));
}

static void unmap_and_free(CUdeviceptr *address)
{
    OK(cuMemUnmap(*address, BUFFER_BYTES));
    OK(cuMemAddressFree(*address, BUFFER_BYTES));
    *address = 0;
}

static void free_buffer(void)
{
    if (job.static_count == 0)
        die("there is no buffer left to free");
    Buffer *last = &job.statics[--job.static_count];
    unmap_and_free(&last->address);
    OK(cuMemRelease(last->handle));
}

/* Frees what `what` names: a call for each kind of memory. */
static void command_free(const char *what)
{
    int next = (job.rank + 1) % job.ranks;
    if (strcmp(what, "buffer") == 0) {
        free_buffer();
    } else if (strcmp(what, "tensor") == 0) {
        OK(cuMemFree(job.spare));
        job.spare = 0;
    } else if (strcmp(what, "import") == 0) {
        unmap_and_free(&job.peer_ring[next]);
    } else if (strcmp(what, "opened") == 0) {
        OK(cuIpcCloseMemHandle(job.peer_shared));
        job.peer_shared = 0;
    } else if (strcmp(what, "alias") == 0) {
        unmap_and_free(&job.window_again);
    } else {
        die("cannot free %s", what);
    }
    answer("ok");
}

static void command_allocate(unsigned long long bytes)
{
    CUdeviceptr address = 0;
    answer_code(cuMemAlloc(&address, bytes));
}

/* Plain memory that is all zero. */
static void command_zeros(unsigned long long bytes)
{
    CUdeviceptr address = 0;
    CUresult code = cuMemAlloc(&address, bytes);
    answer_code(code == CU_OK ? cuMemsetD8(address, 0, bytes) : code);
}

/* Becomes a rank of a communicator of such a library: `communicate ID RANK RANKS`. */
static void command_communicate(const char *line)
{
    typedef struct {
        char bytes[128];
    } Id;
    typedef int (*Init)(void **, int, Id, int);
    Id id = {{0}};
    int rank = 0, ranks = 0;
    void *communicator = NULL;
    if (sscanf(line, "%*s %31s %d %d", id.bytes, &rank, &ranks) != 3)
        die("communicate how? %s", line);
    snprintf(id.bytes + 32, sizeof id.bytes - 32, "%s", strrchr(job.nccl_library, '/'));
    Init init = (Init)dlsym(dlopen(job.nccl_library, RTLD_NOW), "ncclCommInitRank");
    answer_code(init == NULL ? 999 : (CUresult)init(&communicator, ranks, id, rank));
}

/* Plain memory that a library named libnccl... asks for. */
static void command_allocate_as_nccl(unsigned long long bytes)
{
    typedef CUresult (*Allocate)(CUresult (*)(CUdeviceptr *, size_t), CUdeviceptr *, size_t);
    void *library = dlopen(job.nccl_library, RTLD_NOW);
    Allocate allocate = library == NULL ? NULL : (Allocate)dlsym(library, "nccl_like_allocate");
    CUdeviceptr address = 0;
    if (allocate == NULL)
        die("%s: %s", job.nccl_library, dlerror());
    answer_code(allocate(cuMemAlloc, &address, bytes));
}

static void *sublet(const char *name)
{
    void *found = dlsym(RTLD_DEFAULT, name);
    if (found == NULL)
        die("%s is not loaded", name);
    return found;
}

/* Memory of a region: `hold TAG CONTENTS MIB`, each word of it as the pattern for FOR_HELD plus how many came
 * before. Answers its address. */
static void command_hold(const char *line)
{
    static unsigned held;
    char tag[32];
    int contents = 0, mib = 0;
    CUdeviceptr address = 0;
    if (sscanf(line, "%*s %31s %d %d", tag, &contents, &mib) != 3)
        die("hold what? %s", line);
    if (((int (*)(const char *, int))sublet("sublet_region_begin"))(tag, contents) != 0)
        die("sublet_region_begin");
    OK(cuMemAlloc(&address, (size_t)mib << 20));
    if (((int (*)(void))sublet("sublet_region_end"))() != 0)
        die("sublet_region_end");
    fill_with_pattern(address, (size_t)mib << 20, FOR_HELD + held++);
    answer("ok %llu", (unsigned long long)address);
}

static void command_memory(void)
{
    size_t free_bytes = 0, total_bytes = 0;
    OK(cuMemGetInfo(&free_bytes, &total_bytes));
    answer("ok %zu %zu", free_bytes, total_bytes);
}

/* A kernel that never ends unless `release spin` comes: a collective whose peer is missing. */
static void command_spin(void)
{
    CUdeviceptr flag = job.words + 4 * WORD_FLAG;
    uint32_t zero = 0;
    void *params[] = {&flag};
    OK(cuMemcpyHtoD(flag, &zero, sizeof zero));
    driver_launch("spin_until_nonzero", job.side, params);
    answer("ok %s", driver_error(cuStreamQuery(job.side)));
}

static void command_release_spin(void)
{
    CUdeviceptr flag = job.words + 4 * WORD_FLAG;
    uint32_t one = 1;
    void *params[] = {&flag, &one};
    driver_launch("store_u32", job.stream, params);
    OK(cuStreamSynchronize(job.side));
    answer("ok");
}

static void command_capture_begin(void)
{
    CUdeviceptr word = job.words + 4 * WORD_CAPTURED;
    uint32_t value = 4242;
    void *params[] = {&word, &value};
    OK(cuStreamBeginCapture(job.side, 2));
    driver_launch("store_u32", job.side, params);
    answer("ok");
}

/* Ends the capture and runs what it recorded. */
static void command_capture_end(void)
{
    CUdeviceptr word = job.words + 4 * WORD_CAPTURED;
    CUgraphExec graph = NULL;
    uint32_t value = 0;
    OK(cuStreamEndCapture(job.side, &recorded));
    OK(cuGraphInstantiate(&graph, recorded, 0));
    OK(cuGraphLaunch(graph, job.side));
    OK(cuStreamSynchronize(job.side));
    OK(cuMemcpyDtoH(&value, word, sizeof value));
    OK(cuGraphExecDestroy(graph));
    OK(cuGraphDestroy(recorded));
    if (value != 4242)
        die("the captured graph left %u", value);
    answer("ok");
}

/* Calls one function of the ncclPause family. */
static void command_together(const char *name)
{
    int code = ((int (*)(void *))sublet(name))(NULL);
    const char *why = ((const char *(*)(void))sublet("sublet_last_error"))();
    if (code == 0)
        answer("ok");
    else
        answer("no %d %s", code, why);
}

/* Calls sublet_pause_tenant or sublet_resume_tenant for this rank's whole tenant. */
static void command_for_all(const char *name, unsigned timeout_ms)
{
    int code = ((int (*)(const char *, uint32_t))sublet(name))(NULL, timeout_ms);
    const char *why = ((const char *(*)(void))sublet("sublet_last_error"))();
    if (code == 0)
        answer("ok");
    else
        answer("no %d %s", code, why);
}

static void command_stats(void)
{
    int64_t (*stats)(char *, size_t) = (int64_t (*)(char *, size_t))sublet("sublet_stats_json");
    static char text[1 << 20];
    if (stats(text, sizeof text) < 0)
        answer("no %s", ((const char *(*)(void))sublet("sublet_last_error"))());
    else
        answer("ok %s", text);
}

static void command_memory_stats(void)
{
    int code = ((int (*)(void))sublet("ncclMemStats"))();
    answer(code == 0 ? "ok" : "no %d", code);
}

/* A sealed file with these bytes, as only Sublet should make them. */
static int sealed(const unsigned char *bytes, size_t size)
{
    int fd = memfd_create("forged", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || write(fd, bytes, size) != (ssize_t)size)
        die("memfd: %s", strerror(errno));
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        die("seals: %s", strerror(errno));
    return fd;
}

/* A descriptor of memory that was freed after it was exported. As long as it is open it keeps the memory, as one of
 * the driver's does; a `copy` of what is in it does not. */
static int fd_of_freed(bool copy)
{
    Buffer buffer = make_buffer(0);
    unsigned char bytes[512];
    int fd = -1;
    OK(cuMemExportToShareableHandle(&fd, buffer.handle, CU_FD, 0));
    if (copy) {
        ssize_t size = pread(fd, bytes, sizeof bytes, 0);
        int copied = size > 0 ? sealed(bytes, (size_t)size) : -1;
        close(fd);
        fd = copied;
    }
    unmap_and_free(&buffer.address);
    OK(cuMemRelease(buffer.handle));
    return fd;
}

/* Imports a descriptor that is not what it seems. The layout of a ticket: version at 8, allocation
 * at 16, owner at 48, tenant at 56. */
static void command_forge(const char *how)
{
    unsigned char bytes[512];
    CUhandle handle = 0;
    int source = job.ranks > 1 ? fd_of_peer((job.rank + 1) % job.ranks, info_of_peer((job.rank + 1) % job.ranks).window)
                               : fd_of_freed(true);
    ssize_t size = pread(source, bytes, sizeof bytes, 0);
    if (size < 57)
        die("the ticket of a peer has %zd bytes", size);
    int fd = source;
    if (strcmp(how, "stale") == 0) {
        fd = fd_of_freed(true);
    } else if (strcmp(how, "late") == 0) {
        fd = fd_of_freed(false);
    } else if (strcmp(how, "short") == 0) {
        fd = sealed(bytes, 40);
    } else if (strcmp(how, "newer") == 0) {
        bytes[8] = 99;
        fd = sealed(bytes, (size_t)size);
    } else if (strcmp(how, "unknown") == 0) {
        bytes[16] ^= 0xff;
        fd = sealed(bytes, (size_t)size);
    } else if (strcmp(how, "tenant") == 0) {
        bytes[56] = bytes[56] == 'x' ? 'y' : 'x';
        fd = sealed(bytes, (size_t)size);
    } else if (strcmp(how, "owner") == 0) {
        bytes[16] ^= 0xff; /* Unknown here, so that the owner is asked; */
        bytes[48] ^= 0xff; /* and nobody of that name listens. */
        fd = sealed(bytes, (size_t)size);
    } else if (strcmp(how, "none") != 0) {
        die("cannot forge %s", how);
    }
    CUresult code = cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, CU_FD);
    if (code == CU_OK)
        OK(cuMemRelease(handle));
    close(fd);
    if (fd != source)
        close(source);
    answer_code(code);
}

#endif
