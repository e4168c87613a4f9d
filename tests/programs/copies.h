/* The structures by which the driver is told of copies: of rows, of layers, and of several in one call. */
#ifndef COPIES_H
#define COPIES_H
#include "driver.h"

typedef struct {
    size_t x, y;
    unsigned kind;
    void *host;
    CUdeviceptr device;
    void *array;
    size_t pitch;
} Side2d;

typedef struct {
    Side2d from, to;
    size_t width, height;
} Copy2d;

typedef struct {
    size_t x, y, z, level;
    unsigned kind;
    void *host;
    CUdeviceptr device;
    void *array, *context;
    size_t pitch, height;
} Side3d;

typedef struct {
    Side3d from, to;
    size_t width, height, depth;
} Copy3d;

typedef struct {
    unsigned kind;
    CUdeviceptr address;
    size_t row, layer;
    int hint[2];
} Operand;

typedef struct {
    Operand from, to;
    size_t extent[3];
    int order;
    unsigned flags;
} BatchCopy;

#endif
