/* Calls a product with the arguments and the memory that a file holds, and writes the memory back. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { ARGUMENTS = 14 };
void product(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
             int64_t, int64_t);

int main(int count, char **names) {
    FILE *file = fopen(names[1], "r+b");
    int64_t size, a[ARGUMENTS], is_address[ARGUMENTS];
    if (fread(&size, 8, 1, file) + fread(a, 8, ARGUMENTS, file) + fread(is_address, 8, ARGUMENTS, file) != 29) return 1;
    char *memory = malloc(size);
    long begin = ftell(file);
    if (fread(memory, 1, size, file) != size) return 2;
    for (int i = 0; i < ARGUMENTS; i++)
        if (is_address[i]) a[i] += (int64_t)memory;
    product(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13]);
    fseek(file, begin, SEEK_SET);
    return fwrite(memory, 1, size, file) == size && fclose(file) == 0 ? 0 : 3;
}
