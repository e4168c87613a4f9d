/* One rank of a job that uses the driver as NCCL and a framework do. It obeys lines on standard input and
 * answers each with one line that begins with `ok`, `no` (refused, goes on) or `fail` (and ends).
 *
 *   rank --rank R --ranks N --dir DIR [--device D] [--statics COUNT] [--tensor-mib M] [--scratch-mib M]
 *        [--nccl LIBRARY] [--plain]
 *
 * It says `ok ready` when its memory is there. The ranks of a job share DIR. --plain uses no virtual memory
 * management and shares nothing. At the end of its input it ends; it dies with the process that started it.
 */
#include "lines.h"
#include "rank/children.h"

static void command_step(unsigned long long count)
{
    uint64_t sum = 0;
    for (unsigned long long i = 0; i < count; i++)
        sum = step();
    answer("ok %llu %llu", (unsigned long long)job.step, (unsigned long long)sum);
}

/* Steps until a line comes to rank 0, which decides for all, so that all stop at the same step. */
static void command_run(void)
{
    uint64_t sum = 0;
    for (;;) {
        if (job.rank == 0)
            atomic_store(&job.control->run_on, !line_is_waiting());
        meet();
        bool on = atomic_load(&job.control->run_on) != 0;
        meet();
        if (!on)
            break;
        sum = step();
    }
    answer("ok %llu %llu", (unsigned long long)job.step, (unsigned long long)sum);
}

static void command_verify(void)
{
    verify();
    answer("ok %llu %llu", (unsigned long long)job.step, (unsigned long long)verified_bytes);
}

static void command_connect(void)
{
    connect_to_peers();
    meet();
    answer("ok");
}

/* Opens files until it may open no more, and closes them when it is asked again. */
static void command_fill_files(void)
{
    static int opened[4096];
    static size_t count;
    if (count == 0) {
        while (count < 4096 && (opened[count] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0)
            count++;
    } else {
        while (count > 0)
            close(opened[--count]);
    }
    answer("ok %zu", count);
}

static void obey(const char *line)
{
    char first[32] = "", second[32] = "";
    unsigned long long number = 0;
    sscanf(line, "%31s %31s", first, second);
    sscanf(line, "%*s %llu", &number);
    if (strcmp(line, "exit") == 0)
        exit(0);
    if (strcmp(line, "connect") == 0)
        command_connect();
    else if (strcmp(first, "step") == 0)
        command_step(number == 0 ? 1 : number);
    else if (strcmp(line, "run") == 0)
        command_run();
    else if (strcmp(line, "stop") == 0)
        answer("ok");
    else if (strcmp(line, "verify") == 0)
        command_verify();
    else if (strcmp(first, "free") == 0)
        command_free(second);
    else if (strcmp(first, "allocate") == 0)
        command_allocate(number);
    else if (strcmp(first, "zeros") == 0)
        command_zeros(number);
    else if (strcmp(first, "allocate-as-nccl") == 0)
        command_allocate_as_nccl(number);
    else if (strcmp(first, "communicate") == 0)
        command_communicate(line);
    else if (strcmp(first, "hold") == 0)
        command_hold(line);
    else if (strcmp(line, "memory") == 0)
        command_memory();
    else if (strcmp(line, "spin") == 0)
        command_spin();
    else if (strcmp(line, "release spin") == 0)
        command_release_spin();
    else if (strcmp(line, "capture begin") == 0)
        command_capture_begin();
    else if (strcmp(line, "capture end") == 0)
        command_capture_end();
    else if (strcmp(line, "pause inside") == 0)
        command_together("ncclPause");
    else if (strcmp(line, "resume inside") == 0)
        command_together("ncclResume");
    else if (strcmp(first, "pause-all") == 0)
        command_for_all("sublet_pause_tenant", (unsigned)number);
    else if (strcmp(first, "resume-all") == 0)
        command_for_all("sublet_resume_tenant", (unsigned)number);
    else if (strcmp(line, "is paused") == 0)
        answer("ok %d", ((int (*)(void))sublet("sublet_is_paused"))());
    else if (strcmp(line, "fork") == 0)
        command_fork();
    else if (strcmp(line, "leave child") == 0)
        command_leave_child(false);
    else if (strcmp(line, "leave raw child") == 0)
        command_leave_child(true);
    else if (strcmp(line, "spawn") == 0)
        command_spawn();
    else if (strcmp(line, "spawn member") == 0)
        command_spawn_member();
    else if (strcmp(line, "unload") == 0)
        command_unload();
    else if (strcmp(line, "fill files") == 0)
        command_fill_files();
    else if (strcmp(line, "leave") == 0)
        exit(0);
    else if (strcmp(line, "stats") == 0)
        command_stats();
    else if (strcmp(line, "memory stats") == 0)
        command_memory_stats();
    else if (strcmp(first, "forge") == 0)
        command_forge(second);
    else
        die("what is '%s'?", line);
}

static void read_arguments(int count, char **arguments)
{
    job.ranks = 1;
    job.device = -1;
    job.tensor_bytes = 4u << 20;
    job.scratch_bytes = 4u << 20;
    for (int i = 1; i < count; i++) {
        const char *name = arguments[i];
        if (strcmp(name, "--plain") == 0) {
            job.plain = true;
            continue;
        }
        if (++i == count)
            die("%s needs a value", name);
        const char *value = arguments[i];
        if (strcmp(name, "--rank") == 0)
            job.rank = atoi(value);
        else if (strcmp(name, "--ranks") == 0)
            job.ranks = atoi(value);
        else if (strcmp(name, "--dir") == 0)
            job.dir = value;
        else if (strcmp(name, "--device") == 0)
            job.device = atoi(value);
        else if (strcmp(name, "--statics") == 0)
            job.static_count = (unsigned)atoi(value);
        else if (strcmp(name, "--tensor-mib") == 0)
            job.tensor_bytes = (size_t)atoi(value) << 20;
        else if (strcmp(name, "--scratch-mib") == 0)
            job.scratch_bytes = (size_t)atoi(value) << 20;
        else if (strcmp(name, "--nccl") == 0)
            job.nccl_library = value;
        else
            die("what is %s?", name);
    }
    if (job.device < 0)
        job.device = job.rank;
    if (job.dir == NULL || job.ranks < 1 || job.ranks > RANKS_MAX || job.rank < 0 || job.rank >= job.ranks)
        die("wrong arguments");
    if (job.static_count > STATICS_MAX || job.tensor_bytes < BUFFER_BYTES || job.scratch_bytes < BUFFER_BYTES)
        die("too much or too little memory");
}

static void start_driver(void)
{
    CUdevice device = 0;
    driver_load();
    OK(cuInit(0));
    OK(cuDeviceGet(&device, job.device));
    OK(cuDevicePrimaryCtxRetain(&job.context, device));
    OK(cuCtxSetCurrent(job.context));
    OK(cuStreamCreate(&job.stream, 1));
    OK(cuStreamCreate(&job.side, 1));
}

int main(int count, char **arguments)
{
    lines_begin();
    read_arguments(count, arguments);
    map_control();
    start_driver();
    make_memory();
    if (!job.plain)
        start_service();
    capture_graph();
    answer("ok ready");
    lines_obey(obey);
    return 0;
}
