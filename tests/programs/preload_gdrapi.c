/* A library that calls itself GDRCopy's: it gives handles out, and takes them back. */
#include <stddef.h>
#include <stdint.h>

typedef struct {
    unsigned long h;
} gdr_mh_t;

static int opened;

void *gdr_open(void)
{
    return &opened;
}

int gdr_close(void *context)
{
    return context == &opened ? 0 : 22;
}

int gdr_pin_buffer(void *context, unsigned long address, size_t size, uint64_t token, uint32_t space, gdr_mh_t *handle)
{
    (void)address, (void)token, (void)space;
    handle->h = (unsigned long)++opened;
    return context == &opened && size > 1 ? 0 : 22;
}

int gdr_unpin_buffer(void *context, gdr_mh_t handle)
{
    return context == &opened && handle.h != 0 ? 0 : 22;
}
