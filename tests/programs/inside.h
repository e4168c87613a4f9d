/* What Sublet does for its own process, when it is there: without it, nothing, and the program runs on. */
#ifndef SUBLET_TEST_INSIDE_H
#define SUBLET_TEST_INSIDE_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Asks for a pause and says whether there was one. */
static inline int inside_is_paused_within(uint32_t timeout_ms)
{
    int (*act)(const char *, uint32_t) = (int (*)(const char *, uint32_t))dlsym(RTLD_DEFAULT, "sublet_pause_tenant");
    return act != NULL && act(NULL, timeout_ms) == 0;
}

static inline void inside_act(const char *name)
{
    int (*act)(const char *, uint32_t) = (int (*)(const char *, uint32_t))dlsym(RTLD_DEFAULT, name);
    if (act == NULL)
        return;
    int code = act(NULL, 10000);
    const char *(*last_error)(void) = (const char *(*)(void))dlsym(RTLD_DEFAULT, "sublet_last_error");
    if (code != 0) {
        printf("%s: %d %s\n", name, code, last_error());
        exit(1);
    }
}

static inline void inside_pause(void)
{
    inside_act("sublet_pause_tenant");
}

static inline void inside_resume(void)
{
    inside_act("sublet_resume_tenant");
}

/* A program that waits for itself ends by a signal, and not with its test. */
static inline void inside_deadline(unsigned seconds)
{
    setvbuf(stdout, NULL, _IONBF, 0);
    alarm(seconds);
}

#endif
