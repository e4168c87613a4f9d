/* Calls a function that a library of its own stands in for. */
#define _GNU_SOURCE
#include <stdio.h>
#include <unistd.h>

int main(void)
{
    printf("page size and one: %d\n", getpagesize() - (int)sysconf(_SC_PAGESIZE));
    return 0;
}
