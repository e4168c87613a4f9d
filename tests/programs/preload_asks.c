/* Has libraries look names up behind themselves, and says which library each answer is of.
 *
 *   asks WORD...
 *   LIBRARY   this one is asked from here on; it is opened. "here" is one that is there already.
 *   =NAME     looks NAME up
 *   nccl      calls ncclAllReduce as the program finds it, and says which file's code called NCCL then
 *   itself    the same for a call that a thread of NCCL's makes
 */
#define _GNU_SOURCE
#include "attach.h"
#include "file_of.h"
#include "stage.h"

#include <string.h>

static void *asked;

static void obey(const char *word)
{
    if (strcmp(word, "nccl") == 0 || strcmp(word, "itself") == 0) {
        int (*call)(void *, void *, size_t, int, int, void *, void *) = dlsym(RTLD_DEFAULT, "ncclAllReduce");
        int (*itself)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "nccl_calls_itself");
        const char *(*from)(void) = (const char *(*)(void))dlsym(RTLD_DEFAULT, "nccl_called_from");
        int answer = word[0] == 'n' ? call(NULL, NULL, 1, 7, 0, NULL, NULL) : itself();
        printf("%s %d from %s\n", word, answer, from());
    } else if (word[0] == '=') {
        dlerror();
        void *found = ((void *(*)(const char *))dlsym(asked, "next_of"))(word + 1);
        const char *error = dlerror();
        printf("%s %s%s\n", word + 1, file_of(found), (found == NULL) == (error != NULL) ? "" : ", and a wrong error");
    } else {
        asked = strcmp(word, "here") == 0 ? RTLD_DEFAULT : dlopen(stage_file(word), RTLD_NOW | RTLD_LOCAL);
        if (strcmp(word, "here") != 0 && asked == NULL)
            printf("%s\n", dlerror());
    }
}

int main(int count, char **words)
{
    attach_if_asked();
    return stage_obey(count, words, obey);
}
