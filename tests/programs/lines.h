/* A program that obeys lines on standard input, one after the other, until its end, or that of the process that started it. */
#ifndef SUBLET_TEST_LINES_H
#define SUBLET_TEST_LINES_H

#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

/* Called first. */
static inline void lines_begin(void)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setvbuf(stdout, NULL, _IOLBF, 0);
}

/* Does `line` begin with `word`? */
static inline bool is(const char *line, const char *word)
{
    return strncmp(line, word, strlen(word)) == 0;
}

/* Has the next line come? */
static inline bool line_is_waiting(void)
{
    struct pollfd input = {.fd = 0, .events = POLLIN};
    return poll(&input, 1, 0) > 0;
}

static inline void lines_obey(void (*obey)(const char *line))
{
    static char input[4096];
    size_t used = 0;
    /* Without a buffer of the library's, so that a line that waits is seen by poll. */
    while (used < sizeof input - 1) {
        ssize_t got = read(0, input + used, 1);
        if (got <= 0)
            break;
        if (input[used] != '\n') {
            used++;
            continue;
        }
        input[used] = '\0';
        used = 0;
        obey(input);
    }
}

/* A child lives on without its parent, and holds none of its pipes. */
static inline void live_on(void)
{
    for (int fd = 0; fd < 3; fd++)
        close(fd);
    alarm(60);
    for (;;)
        pause();
}

#endif
