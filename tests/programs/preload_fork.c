/* A process that has joined forks children which end in various ways; then it uses its memory again. */
#define _GNU_SOURCE
#include "driver.h"

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

int main(int argc, char **argv)
{
    CUdeviceptr memory = 0, more = 0;
    driver_start();
    OK(cuMemAlloc(&memory, WORDS * 4));
    driver_fill(memory, 35, WORDS, NULL);
    OK(cuCtxSynchronize());
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
