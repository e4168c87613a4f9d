/* What programs have in common that obey words and open libraries of their test's folder, STAGE_DIR. */
#ifndef SUBLET_TEST_STAGE_H
#define SUBLET_TEST_STAGE_H

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* A file of that folder, unless `name` says where it is. Good until the thread asks again. */
static inline const char *stage_file(const char *name)
{
    static _Thread_local char path[4096];
    snprintf(path, sizeof path, "%s%s%s", name[0] == '/' ? "" : getenv("STAGE_DIR"), name[0] == '/' ? "" : "/", name);
    return path;
}

/* For a word that the program does not know. */
static inline void stage_unknown(const char *word)
{
    printf("what is %s?\n", word);
    exit(2);
}

/* Obeys one word after the other. A program that hangs is ended. */
static inline int stage_obey(int count, char **words, void (*obey)(const char *))
{
    alarm(120);
    for (int i = 1; i < count; i++) {
        obey(words[i]);
        fflush(stdout);
    }
    return 0;
}

#endif
