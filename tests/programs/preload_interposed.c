/* Calls a function that a library of its own stands in for. */
#define _GNU_SOURCE
#include "attach.h"

#include <stdio.h>
#include <unistd.h>

int main(void)
{
    attach_if_asked();
    printf("page size and one: %d\n", getpagesize() - (int)sysconf(_SC_PAGESIZE));
    return 0;
}
