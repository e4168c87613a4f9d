/* A process that has joined forks children which end in various ways; then it uses its memory again. The word child-only: one child
 * alone, the same with and without Sublet. The word unseen: a child that no handler of forks is told of. */
#define _GNU_SOURCE
#include "driver.h"

#include <ftw.h>
#include <sys/wait.h>
#include <unistd.h>

#define WORDS 1024

static void *ours(const char *name)
{
    return dlsym(RTLD_DEFAULT, name);
}

/* Waits for a child and says how it ended. */
static void await(pid_t child, const char *who)
{
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child)
        exit(1);
    printf("%s ended %d\n", who, status);
    fflush(stdout);
}

static pid_t child_uses_driver(int with_us)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        CUdeviceptr memory = 0;
        printf("child: allocation %d", cuMemAlloc(&memory, 4));
        if (with_us) {
            int64_t (*stats)(char *, size_t) = (int64_t(*)(char *, size_t))ours("sublet_stats_json");
            int (*is_paused)(void) = (int (*)(void))ours("sublet_is_paused");
            printf(", stats %lld, paused %d", (long long)stats(NULL, 0), is_paused());
        }
        printf("\n");
        /* Runs the handlers that the parent registered. */
        exit(0);
    }
    return child;
}

static pid_t child_executes(void)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        execlp("echo", "echo", "child runs another program", (char *)NULL);
        _exit(1);
    }
    return child;
}

static pid_t child_forks(void)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        pid_t grandchild = fork();
        if (grandchild == 0)
            exit(0);
        await(grandchild, "child's child");
        _exit(0);
    }
    return child;
}

static int sockets;
static ino_t last_socket;
static struct timespec last_made;

static int note_socket(const char *path, const struct stat *status, int kind)
{
    (void)path, (void)kind;
    if (S_ISSOCK(status->st_mode)) {
        sockets++;
        last_socket = status->st_ino;
        last_made = status->st_ctim;
    }
    return 0;
}

/* The child ends as a program does. The socket of its parent is the same afterwards, and no other that was made again. */
static void child_is_unseen(void)
{
    const char *folder = getenv("SUBLET_RUN_DIR");
    fflush(stdout);
    ftw(folder, note_socket, 8);
    ino_t socket = last_socket;
    struct timespec made = last_made;
    pid_t child = _Fork();
    if (child == 0)
        exit(0);
    await(child, "unseen child");
    last_socket = 0;
    ftw(folder, note_socket, 8);
    printf("sockets: %d, the same %d\n", sockets, socket == last_socket && memcmp(&made, &last_made, sizeof made) == 0);
}

int main(int argc, char **argv)
{
    CUdeviceptr memory = 0, more = 0;
    driver_start();
    OK(cuMemAlloc(&memory, WORDS * 4));
    driver_fill(memory, 35, WORDS, NULL);
    OK(cuCtxSynchronize());
    if (argc > 1 && strcmp(argv[1], "unseen") == 0) {
        child_is_unseen();
        return 0;
    }
    await(child_uses_driver(argc == 1), "child");
    if (argc > 1)
        return 0;
    await(child_executes(), "child");
    await(child_forks(), "child");
    int (*pause_tenant)(const char *, uint32_t) = (int (*)(const char *, uint32_t))ours("sublet_pause_tenant");
    int (*resume_tenant)(const char *, uint32_t) = (int (*)(const char *, uint32_t))ours("sublet_resume_tenant");
    int (*is_paused)(void) = (int (*)(void))ours("sublet_is_paused");
    int paused = pause_tenant(NULL, 0), is = is_paused();
    printf("after: pause %d, paused %d, resume %d\n", paused, is, resume_tenant(NULL, 0));
    unsigned long long sum = driver_sum(memory, WORDS, NULL);
    printf("after: sum %llu, allocation %d\n", sum, cuMemAlloc(&more, 4));
    OK(cuMemFree(more));
    OK(cuMemFree(memory));
    return 0;
}
