/* A library that calls itself libibverbs: it counts registrations, and has two versions of the first function, as the
 * real one has. */
#include <stddef.h>
#include <stdint.h>

struct ibv_mr {
    void *address;
    size_t length;
};

static struct ibv_mr regions[16];
static int next;

static struct ibv_mr *made(void *address, size_t length)
{
    struct ibv_mr *region = &regions[next++ % 16];
    *region = (struct ibv_mr){address, length};
    return length == 1 ? NULL : region;
}

void *ibv_get_device_list(int *count)
{
    *count = next;
    return NULL;
}

/* What programs of long ago are bound to. */
struct ibv_mr *old_reg_mr(void *domain, void *address, size_t length, int access)
{
    (void)domain, (void)access;
    return made(address, length);
}

struct ibv_mr *new_reg_mr(void *domain, void *address, size_t length, int access)
{
    (void)domain, (void)access;
    return made(address, length);
}

struct ibv_mr *ibv_reg_mr_iova2(void *domain, void *address, size_t length, uint64_t at, unsigned access)
{
    (void)domain, (void)at, (void)access;
    return made(address, length);
}

int ibv_dereg_mr(struct ibv_mr *region)
{
    return region->length == 0 ? 22 : 0;
}

__asm__(".symver old_reg_mr, ibv_reg_mr@IBVERBS_1.0");
__asm__(".symver new_reg_mr, ibv_reg_mr@@IBVERBS_1.1");
