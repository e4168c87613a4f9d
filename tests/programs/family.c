/* A process that lends memory to processes of other tenants, and borrows theirs. It obeys lines on standard input and
 * answers each with one line, `ok ...` or `no CODE`:
 *
 *   allocate SEED          a block by cuMemAlloc, filled
 *   tagged TAG SEED        the same in a region of that tag
 *   spare TAG              another one, which is never looked at
 *   away TAG | back TAG    pauses or resumes its own memory of a tag by itself
 *   create SEED            the same by cuMemCreate, which can be exported
 *   fill SEED              fills it again
 *   own SEED               does it hold that?
 *   free                   gives it up
 *   handle                 its cudaIpc handle, as text
 *   export                 process id and number of a descriptor for it
 *   open HANDLE            opens another process's block
 *   import PID FD          the same by a descriptor
 *   look SEED              does what is open hold that?
 *   store SEED             fills it
 *   again                  the handle of what is open, requested here
 *   close                  closes it, by the way it came
 *   fork                   leaves a child that stands still
 *   buckets COUNT SEED HANDLE   opens, looks and closes so often
 *   trade SEED HANDLE      the same until the next line, which is answered with the count
 *
 * usage: family [DEVICE]
 */
#include "block.h"

#include <fcntl.h>

enum { BYTES = 4 << 20 };

static struct {
    CUdeviceptr block, peer;
    CUhandle created, imported;
    int device, exported;
} own;

static CUresult say(CUresult code)
{
    if (code == CU_OK)
        printf("ok\n");
    else
        printf("no %s\n", driver_error(code));
    return code;
}

static void fill(CUdeviceptr data, unsigned seed)
{
    block_fill(data, BYTES, seed);
}

static bool holds(CUdeviceptr data, unsigned seed)
{
    return block_holds(data, BYTES, seed);
}

static CUdeviceptr mapped(CUhandle handle)
{
    CUdeviceptr place = 0;
    CUaccess access = {.location = {1, own.device}, .flags = 3};
    OK(cuMemAddressReserve(&place, BYTES, 0, 0, 0));
    OK(cuMemMap(place, BYTES, 0, handle, 0));
    OK(cuMemSetAccess(place, BYTES, &access, 1));
    return place;
}

static void unmap(CUdeviceptr place, CUhandle handle)
{
    OK(cuMemUnmap(place, BYTES));
    OK(cuMemAddressFree(place, BYTES));
    OK(cuMemRelease(handle));
}

static void allocate(unsigned seed)
{
    OK(cuMemAlloc(&own.block, BYTES));
    fill(own.block, seed);
    printf("ok\n");
}

static CUdeviceptr in_region(const char *tag)
{
    CUdeviceptr made = 0;
    if (((int (*)(const char *, int))sublet("sublet_region_begin"))(tag, 0) != 0)
        exit(4);
    OK(cuMemAlloc(&made, BYTES));
    if (((int (*)(void))sublet("sublet_region_end"))() != 0)
        exit(4);
    fill(made, 1);
    return made;
}

/* By this process alone. */
static void act_on(const char *tag, const char *what)
{
    int (*act)(const char *, const char *const *, size_t, int, uint32_t) = sublet(what);
    if (act(NULL, &tag, 1, 1, 30000) == 0)
        printf("ok\n");
    else
        printf("no %s\n", sublet_says());
}

static void create(unsigned seed)
{
    CUprop prop = driver_prop();
    prop.location.id = own.device;
    OK(cuMemCreate(&own.created, BYTES, &prop, 0));
    own.block = mapped(own.created);
    fill(own.block, seed);
    printf("ok\n");
}

static void give_up(void)
{
    if (own.created != 0)
        unmap(own.block, own.created);
    else
        OK(cuMemFree(own.block));
    own.block = own.created = 0;
    printf("ok\n");
}

static void print_handle(CUdeviceptr block)
{
    CUipcMemHandle handle;
    CUresult code = cuIpcGetMemHandle(&handle, block);
    if (code != CU_OK) {
        say(code);
        return;
    }
    printf("ok ");
    for (size_t i = 0; i < sizeof handle.bytes; i++)
        printf("%02x", (unsigned char)handle.bytes[i]);
    printf("\n");
}

static CUipcMemHandle handle_of(const char *text)
{
    CUipcMemHandle handle;
    for (size_t i = 0; i < sizeof handle.bytes; i++) {
        unsigned byte = 0;
        sscanf(text + 2 * i, "%2x", &byte);
        handle.bytes[i] = (char)byte;
    }
    return handle;
}

static void export(void)
{
    CUresult code = cuMemExportToShareableHandle(&own.exported, own.created, CU_FD, 0);
    if (code != CU_OK)
        say(code);
    else
        printf("ok %d %d\n", (int)getpid(), own.exported);
}

static void import(int pid, int number)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, number);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    CUresult code = cuMemImportFromShareableHandle(&own.imported, (void *)(intptr_t)fd, CU_FD);
    close(fd);
    if (code == CU_OK)
        own.peer = mapped(own.imported);
    say(code);
}

static void let_go(void)
{
    if (own.imported != 0) {
        unmap(own.peer, own.imported);
        printf("ok\n");
    } else {
        say(cuIpcCloseMemHandle(own.peer));
    }
    own.peer = own.imported = 0;
}

/* The child dies with its parent. */
static void leave_child(void)
{
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;)
            pause();
    }
    printf(child > 0 ? "ok\n" : "no child\n");
}

/* One bucket: false where it was refused or wrong, which is said. */
static bool bucket(const char *text, unsigned seed, unsigned long long number)
{
    CUdeviceptr place = 0;
    CUresult code = cuIpcOpenMemHandle(&place, handle_of(text), 1);
    if (code != CU_OK) {
        printf("no %s in bucket %llu\n", driver_error(code), number);
        return false;
    }
    bool right = holds(place, seed);
    OK(cuIpcCloseMemHandle(place));
    if (!right)
        printf("no, bucket %llu holds something else\n", number);
    return right;
}

static void trade(const char *text, unsigned seed, unsigned long long count)
{
    char line[16];
    unsigned long long done = 0;
    while (count == 0 ? !line_is_waiting() : done < count)
        if (!bucket(text, seed, done++))
            return;
    if (count == 0 && read(0, line, sizeof line) <= 0)
        exit(0);
    printf("ok %llu\n", done);
}

static void obey(const char *line)
{
    char text[256] = "";
    unsigned seed = 0, count = 0;
    int pid = 0, fd = 0;
    sscanf(line, "%*s %u", &seed);
    if (is(line, "allocate"))
        allocate(seed);
    else if (sscanf(line, "tagged %255s %u", text, &seed) == 2)
        own.block = in_region(text), fill(own.block, seed), printf("ok\n");
    else if (sscanf(line, "spare %255s", text) == 1)
        in_region(text), printf("ok\n");
    else if (sscanf(line, "away %255s", text) == 1)
        act_on(text, "sublet_pause_tags");
    else if (sscanf(line, "back %255s", text) == 1)
        act_on(text, "sublet_resume_tags");
    else if (is(line, "create"))
        create(seed);
    else if (is(line, "fill"))
        fill(own.block, seed), printf("ok\n");
    else if (is(line, "own"))
        printf(holds(own.block, seed) ? "ok\n" : "no, it does not\n");
    else if (is(line, "free"))
        give_up();
    else if (is(line, "handle"))
        print_handle(own.block);
    else if (is(line, "again"))
        print_handle(own.peer);
    else if (is(line, "export"))
        export();
    else if (sscanf(line, "open %255s", text) == 1)
        say(cuIpcOpenMemHandle(&own.peer, handle_of(text), 1));
    else if (sscanf(line, "import %d %d", &pid, &fd) == 2)
        import(pid, fd);
    else if (is(line, "look"))
        printf(holds(own.peer, seed) ? "ok\n" : "no, it does not\n");
    else if (is(line, "store"))
        fill(own.peer, seed), printf("ok\n");
    else if (is(line, "fork"))
        leave_child();
    else if (is(line, "close"))
        let_go();
    else if (sscanf(line, "buckets %u %u %255s", &count, &seed, text) == 3)
        trade(text, seed, count);
    else if (sscanf(line, "trade %u %255s", &seed, text) == 2)
        trade(text, seed, 0);
    else
        exit(2);
}

int main(int count, char **arguments)
{
    lines_begin();
    own.device = count > 1 ? atoi(arguments[1]) : 0;
    block_begin(own.device);
    lines_obey(obey);
    return 0;
}
