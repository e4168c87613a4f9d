/* One process takes another's memory off the device and brings it back: states, what is free, calls that wait, and what stands in the way.
 *
 * The child does as it is told by bytes on a pipe, and answers each with a byte. */
#define _GNU_SOURCE
#include "driver.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define HELD (16 * MIB)

/* Looked up here alone: other programs run on drivers that lack them. */
static CUresult (*get_state)(int, unsigned *), (*get_thread)(int, int *), (*lock_process)(int, CUlockArgs *);
static CUresult (*checkpoint)(int, void *), (*restore)(int, void *), (*unlock)(int, void *);

static void look_up(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    *(void **)&get_state = dlsym(library, "cuCheckpointProcessGetState");
    *(void **)&get_thread = dlsym(library, "cuCheckpointProcessGetRestoreThreadId");
    *(void **)&lock_process = dlsym(library, "cuCheckpointProcessLock");
    *(void **)&checkpoint = dlsym(library, "cuCheckpointProcessCheckpoint");
    *(void **)&restore = dlsym(library, "cuCheckpointProcessRestore");
    *(void **)&unlock = dlsym(library, "cuCheckpointProcessUnlock");
}

/* The ends that a child has. */
enum { ORDERS = 3, ANSWERS = 4 };

static int to_child[2], from_child[2];

static void child(void)
{
    CUipcMemHandle name;
    CUdeviceptr held = 0, opened = 0;
    CUhandle host = 0, own = 0, imported = 0;
    char order;
    driver_start();
    OK(cuMemAlloc(&held, HELD));
    driver_fill(held, 7, HELD / 4, NULL);
    OK(cuCtxSynchronize());
    while (read(ORDERS, &order, 1) == 1) {
        char answer = order;
        if (order == 's') { /* sum */
            answer = driver_sum(held, HELD / 4, NULL) == 7 * (uint64_t)(HELD / 4) ? 'y' : 'n';
        } else if (order == 'h') { /* memory of a host node */
            CUprop prop = driver_prop();
            prop.location.type = 3;
            OK(cuMemCreate(&host, 2 * MIB, &prop, 0));
        } else if (order == 'H') {
            OK(cuMemRelease(host));
        } else if (order == 'i') { /* an import */
            CUprop prop = driver_prop();
            int fd = -1;
            OK(cuMemCreate(&own, 2 * MIB, &prop, 0));
            OK(cuMemExportToShareableHandle(&fd, own, CU_FD, 0));
            OK(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)fd, CU_FD));
            close(fd);
        } else if (order == 'o') { /* open by a cudaIpc handle */
            if (read(ORDERS, &name, sizeof name) != sizeof name)
                exit(1);
            OK(cuIpcOpenMemHandle(&opened, name, 1));
        }
        if (write(ANSWERS, &answer, 1) != 1)
            exit(1);
    }
    exit(0);
}

static char answer(void)
{
    char byte = '?';
    return read(from_child[0], &byte, 1) == 1 ? byte : '?';
}

static char ask(char order)
{
    if (write(to_child[1], &order, 1) != 1)
        exit(1);
    return answer();
}

/* A program of its own: a fork has no use of a driver that its parent has started. */
static int start(void)
{
    if (pipe2(to_child, O_CLOEXEC) != 0 || pipe2(from_child, O_CLOEXEC) != 0)
        exit(1);
    fflush(stdout);
    int pid = fork();
    if (pid == 0) {
        int orders = fcntl(to_child[0], F_DUPFD, 10), answers = fcntl(from_child[1], F_DUPFD, 10);
        dup2(orders, ORDERS);
        dup2(answers, ANSWERS);
        close(orders);
        close(answers);
        execl("/proc/self/exe", "checkpoint", "child", NULL);
        _exit(1);
    }
    close(to_child[0]);
    close(from_child[1]);
    ask('-');
    return pid;
}

static void end(int pid)
{
    close(to_child[1]);
    close(from_child[0]);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

static void say(const char *what, CUresult code)
{
    printf("%s: %s\n", what, driver_error(code));
}

static void say_state(int pid)
{
    static const char *names[] = {"running", "locked", "checkpointed", "failed"};
    unsigned state = 4;
    CUresult code = get_state(pid, &state);
    printf("  %s\n", code == CU_OK && state < 4 ? names[state] : driver_error(code));
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "child") == 0)
        child();
    CUlockArgs soon = {10000, 0, {0}}, bad = {1, 1, {0}};
    int thread = 0;
    int pid = start();
    driver_start();
    look_up();
    size_t before = driver_free_bytes();
    say("checkpoint of one that runs", checkpoint(pid, NULL));
    say("unlock of one that runs", unlock(pid, NULL));
    say("lock with a reserved word", lock_process(pid, &bad));
    say_state(pid);
    say("thread", get_thread(pid, &thread));
    say("lock", lock_process(pid, &soon));
    say_state(pid);
    say("a second lock", lock_process(pid, &soon));
    say("checkpoint", checkpoint(pid, NULL));
    say_state(pid);
    /* The allocation, and what the child's context costs. */
    printf("freed: %zu MiB\n", (driver_free_bytes() - before) / MIB);
    say("unlock of one that is checkpointed", unlock(pid, NULL));
    char order = 's';
    struct pollfd waits = {from_child[0], POLLIN, 0};
    if (write(to_child[1], &order, 1) != 1)
        return 1;
    printf("a call meanwhile: %s\n", poll(&waits, 1, 100) == 0 ? "waits" : "went through");
    CUdeviceptr all = 0;
    OK(cuMemAlloc(&all, driver_free_bytes()));
    say("restore without room", restore(pid, NULL));
    say_state(pid);
    OK(cuMemFree(all));
    say("restore", restore(pid, NULL));
    say_state(pid);
    printf("as before: %s\n", driver_free_bytes() == before ? "yes" : "no");
    say("unlock", unlock(pid, NULL));
    say_state(pid);
    printf("the call, and its memory: %c\n", answer());
    say("a process that has no driver", lock_process(getppid(), &soon));

    printf("memory of a host node\n");
    ask('h');
    OK(lock_process(pid, &soon));
    say("checkpoint", checkpoint(pid, NULL));
    say("restore", restore(pid, NULL));
    say_state(pid);
    end(pid);
    say("a process that has ended", lock_process(pid, &soon));

    printf("memory of a host node that was given back\n");
    pid = start();
    ask('h');
    ask('H');
    OK(lock_process(pid, &soon));
    OK(checkpoint(pid, NULL));
    say("restore", restore(pid, NULL));
    OK(unlock(pid, NULL));

    printf("an import\n");
    ask('i');
    OK(lock_process(pid, &soon));
    say("checkpoint", checkpoint(pid, NULL));
    say("restore", restore(pid, NULL));
    end(pid);

    printf("memory open by a cudaIpc handle\n");
    pid = start();
    CUdeviceptr shared = 0;
    CUipcMemHandle name;
    OK(cuMemAlloc(&shared, 2 * MIB));
    OK(cuIpcGetMemHandle(&name, shared));
    order = 'o';
    if (write(to_child[1], &order, 1) != 1 || write(to_child[1], &name, sizeof name) != sizeof name)
        return 1;
    answer();
    OK(lock_process(pid, &soon));
    say("checkpoint", checkpoint(pid, NULL));
    say("restore", restore(pid, NULL));
    say_state(pid);
    /* Killed where it stands: nothing of it stays. */
    end(pid);
    OK(cuMemFree(shared));
    pid = start();
    OK(lock_process(pid, &soon));
    OK(checkpoint(pid, NULL));
    end(pid);
    printf("free in the end: %s\n", driver_free_bytes() == before + HELD + 10 * MIB ? "all" : "not all");
    return 0;
}
