/* A process that takes turns. It obeys lines on standard input and answers each with one line, `ok ...` or `no CODE WORDS`:
 *
 *   allocate MIB SEED   a block, filled
 *   fill SEED           fills it again
 *   own SEED            does it hold that?
 *   more MIB SEED       a second block next to it, filled
 *   owns SEED           does that one hold that?
 *   begin MS            a turn, waited for so long
 *   end                 its end
 *   rounds COUNT SEED   so often a turn in which the block must hold SEED, and SEED + 1 the next time, and so on
 *   work SEED           fills and looks until the next line, which is answered with the next seed
 *   spin, release       a kernel that waits for a word of the block, and that word
 *   switch TENANT MS    has another tenant get its GPUs
 *   capture MODE, captured   begins a stream capture, and ends it
 *   fork                a child, which lives until it is killed, for two minutes at most
 *   child-ends          what the child is told when it ends a turn
 *   start               what it otherwise begins with, where STARTS_LATER is in the environment: the first use of the driver
 *
 * usage: turns [DEVICE]
 */
#include "block.h"

static struct {
    CUdeviceptr block;
    CUgraph graph;
    size_t bytes;
} own;

/* The second block. */
static struct {
    CUdeviceptr block;
    size_t bytes;
} more;

static bool say(int code)
{
    if (code == 0)
        printf("ok\n");
    else
        printf("no %d %s\n", code, sublet_says());
    return code == 0;
}

static int begin(unsigned wait_ms)
{
    return ((int (*)(uint32_t))sublet("sublet_turn_begin"))(wait_ms);
}

static int end(void)
{
    return ((int (*)(void))sublet("sublet_turn_end"))();
}

static void fill(unsigned seed)
{
    block_fill(own.block, own.bytes, seed);
}

static bool holds(unsigned seed)
{
    return block_holds(own.block, own.bytes, seed);
}

static void allocate(CUdeviceptr *block, size_t *bytes, unsigned mib, unsigned seed)
{
    CUresult code = cuMemAlloc(block, (size_t)mib << 20);
    if (code != CU_OK) {
        printf("no %s\n", driver_error(code));
        return;
    }
    *bytes = (size_t)mib << 20;
    block_fill(*block, *bytes, seed);
    printf("ok\n");
}

static void rounds(unsigned count, unsigned seed)
{
    for (unsigned round = 0; round < count; round++) {
        int code = begin(120000);
        if (code != 0) {
            say(code);
            return;
        }
        if (!holds(seed + round)) {
            printf("no, the block is another in round %u\n", round);
            return;
        }
        fill(seed + round + 1);
        end();
    }
    printf("ok %u\n", seed + count);
}

static void work(unsigned seed)
{
    char line[16];
    while (!line_is_waiting()) {
        if (!holds(seed)) {
            printf("no, the block does not hold %u\n", seed);
            return;
        }
        fill(++seed);
    }
    if (read(0, line, sizeof line) <= 0)
        exit(0);
    printf("ok %u\n", seed);
}

static CUstream other_stream(void)
{
    static CUstream other;
    if (other == NULL)
        OK(cuStreamCreate(&other, 1));
    return other;
}

static void spin(void)
{
    void *params[] = {&own.block};
    OK(cuMemsetD32Async(own.block, 0, 1, stream));
    driver_launch("spin_until_nonzero", stream, params);
    printf("ok\n");
}

static void release(void)
{
    OK(cuMemsetD32Async(own.block, 1, 1, other_stream()));
    OK(cuStreamSynchronize(stream));
    printf("ok\n");
}

static int to_child[2], from_child[2];

static void fork_child(void)
{
    if (pipe(to_child) != 0 || pipe(from_child) != 0)
        exit(2);
    pid_t child = fork();
    if (child == 0) {
        char byte;
        alarm(120);
        while (read(to_child[0], &byte, 1) == 1) {
            int code = end();
            if (write(from_child[1], &code, sizeof code) != sizeof code)
                _exit(2);
        }
        _exit(0);
    }
    printf("ok %d\n", (int)child);
}

static void child_ends(void)
{
    int code = -1;
    if (write(to_child[1], "e", 1) != 1 || read(from_child[0], &code, sizeof code) != sizeof code)
        exit(2);
    printf("ok %d\n", code);
}

static int device;

static void obey(const char *line)
{
    char text[256] = "";
    unsigned first = 0, second = 0;
    sscanf(line, "%*s %u %u", &first, &second);
    if (is(line, "allocate"))
        allocate(&own.block, &own.bytes, first, second);
    else if (is(line, "more"))
        allocate(&more.block, &more.bytes, first, second);
    else if (is(line, "owns"))
        printf(block_holds(more.block, more.bytes, first) ? "ok\n" : "no, it does not\n");
    else if (is(line, "fill"))
        fill(first), printf("ok\n");
    else if (is(line, "own"))
        printf(holds(first) ? "ok\n" : "no, it does not\n");
    else if (is(line, "begin"))
        say(begin(first));
    else if (is(line, "end"))
        say(end());
    else if (is(line, "rounds"))
        rounds(first, second);
    else if (is(line, "captured"))
        say(cuStreamEndCapture(stream, &own.graph));
    else if (is(line, "capture"))
        say(cuStreamBeginCapture(stream, first));
    else if (is(line, "spin"))
        spin();
    else if (is(line, "release"))
        release();
    else if (is(line, "work"))
        work(first);
    else if (is(line, "fork"))
        fork_child();
    else if (is(line, "child-ends"))
        child_ends();
    else if (is(line, "start"))
        block_begin(device);
    else if (sscanf(line, "switch %255s %u", text, &first) == 2)
        say(((int (*)(const char *, uint32_t))sublet("sublet_switch_tenant"))(text, first));
    else
        exit(2);
}

int main(int count, char **arguments)
{
    lines_begin();
    device = count > 1 ? atoi(arguments[1]) : 0;
    if (getenv("STARTS_LATER") == NULL)
        block_begin(device);
    else
        printf("ok\n");
    lines_obey(obey);
    return 0;
}
