/* Numbers that look random, and pauses at such instants. */
#ifndef SUBLET_TEST_AT_RANDOM_H
#define SUBLET_TEST_AT_RANDOM_H

#include "inside.h"

/* The next after `*random`, less than `below`. */
static inline unsigned random_below(uint64_t *random, unsigned below)
{
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(*random >> 33) % below;
}

/* Pauses and resumes the process so often, with up to 20 ms before each pause. */
static inline void pause_at_random(uint64_t seed, int pauses)
{
    for (int i = 0; i < pauses; i++) {
        usleep(random_below(&seed, 20000));
        inside_pause();
        usleep(random_below(&seed, 3000));
        inside_resume();
    }
}

#endif
