/* Says where a process crashes, on any thread: crash_say() once, and each SIGSEGV and SIGBUS writes on standard error what was touched, by which
 * thread, from where, and what is mapped there. Then the process ends as it would have. */
#define _GNU_SOURCE
#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define FRAMES_MAX 48

/* The lines of this process's map that hold one of the addresses, and their neighbours. */
static void say_maps(const uintptr_t *addresses, int count)
{
    char line[512], before[512] = "";
    FILE *maps = fopen("/proc/self/maps", "re");
    if (maps == NULL)
        return;
    int left = 0;
    while (fgets(line, sizeof line, maps) != NULL) {
        unsigned long from = 0, until = 0;
        sscanf(line, "%lx-%lx", &from, &until);
        for (int i = 0; i < count; i++)
            if (addresses[i] >= from - (1u << 20) && addresses[i] < until + (1u << 20)) {
                if (left == 0)
                    dprintf(2, "crash map: %s", before);
                left = 2;
            }
        if (left > 0) {
            dprintf(2, "crash map: %s", line);
            left--;
        }
        strcpy(before, line);
    }
    fclose(maps);
}

static void say(int number, siginfo_t *info, void *context)
{
    static volatile int said;
    if (__sync_lock_test_and_set(&said, 1) == 0) {
        void *frames[FRAMES_MAX];
        char name[17] = "";
        uintptr_t addresses[2] = {(uintptr_t)info->si_addr, 0};
#ifdef __x86_64__
        addresses[1] = (uintptr_t)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
#endif
        prctl(PR_GET_NAME, name);
        dprintf(2, "crash: signal %d code %d, address %p, at %p, thread %ld '%s'\n", number, info->si_code, info->si_addr,
                (void *)addresses[1], (long)syscall(SYS_gettid), name);
        backtrace_symbols_fd(frames, backtrace(frames, FRAMES_MAX), 2);
        say_maps(addresses, 2);
    }
    signal(number, SIG_DFL);
    raise(number);
}

void crash_say(void)
{
    void *frames[2];
    struct sigaction action = {.sa_sigaction = say, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    /* Loads what it needs now. */
    backtrace(frames, 2);
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
}
