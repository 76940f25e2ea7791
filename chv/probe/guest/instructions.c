/*
 * The instructions that stock kernels need, tried one by one (Intel SDM 2, CPUID bits from its
 * table 3-8). Each says its name before it is tried: a KVM that cannot emulate one may end the
 * whole VMM, and the name is then the last word. Order: what a kernel meets first comes first.
 */
#include "fault.h"
#include "instructions.h"
#include "memory.h"
#include "say.h"
#include "text.h"

enum { EAX, EBX, ECX, EDX };
enum { BREAKPOINT = 3, INVALID_OPCODE = 6 };
enum { EFER = 0xc0000080, STAR = 0xc0000081, LSTAR = 0xc0000082, FMASK = 0xc0000084 };

/* Where CPUID promises an instruction; leaf 0: every 64-bit CPU has it. */
struct promise { u32 leaf; u8 reg, bit; };
struct instruction {
    const char *name;
    struct promise promise;
    void (*run)(void);
    u32 vector;                                  /* the exception that is its purpose */
    u64 want;                                    /* what it leaves in got */
};

extern void attempt_iret(void), attempt_iret_user(void), attempt_sysret(void);
extern void attempt_syscall(void);
extern u64 gdt_tss[2];
static u64 got;
static u8 area[4096] __attribute__((aligned(64))) DMA;
static u8 ring0_stack[4096] DMA;
static struct { u32 reserved; u64 rsp0; u8 rest[92]; } __attribute__((packed)) tss;

static void cpuid(u32 leaf, u32 sub, u32 out[4]) {
    __asm__ volatile("cpuid" : "=a"(out[0]), "=b"(out[1]), "=c"(out[2]), "=d"(out[3])
                     : "a"(leaf), "c"(sub));
}

static bool promised(const struct promise *p) {
    u32 out[4];
    if (!p->leaf) return true;
    cpuid(p->leaf & 0x80000000, 0, out);
    if (out[EAX] < (p->leaf & ~0x0f000000u)) return false;
    u32 sub = p->leaf >> 24 & 0xf;               /* bits 24-27 of our leaf: the sub-leaf */
    cpuid(p->leaf & ~0x0f000000u, sub, out);
    return out[p->reg] >> p->bit & 1;
}

static u64 rdmsr(u32 msr) {
    u32 low, high;
    __asm__ volatile("rdmsr" : "=a"(low), "=d"(high) : "c"(msr));
    return (u64)high << 32 | low;
}

static void wrmsr(u32 msr, u64 v) {
    __asm__ volatile("wrmsr" ::"c"(msr), "a"((u32)v), "d"((u32)(v >> 32)));
}

/* ---- one function for each instruction ---- */

static void run_cpuid(void) {
    u32 out[4];
    cpuid(0, 0, out);
    got = out[EAX] > 0;
}

static void run_rdmsr(void) { got = rdmsr(EFER) >> 10 & 1; }
static void run_wrmsr(void) { wrmsr(EFER, rdmsr(EFER) | 1); }
static void run_int3(void) { __asm__ volatile("int3"); }
static void run_ud2(void) { __asm__ volatile("ud2"); }

static void run_mov_cr(void) {
    u64 cr4, cr0;
    u32 out[4];
    cpuid(1, 0, out);
    __asm__ volatile("mov %%cr0, %0; mov %%cr4, %1" : "=r"(cr0), "=r"(cr4));
    cr0 = (cr0 & ~4ull) | 2;                     /* no emulation, monitor the FPU */
    cr4 |= 1 << 9 | 1 << 10 | (out[ECX] >> 26 & 1) << 18;  /* OSFXSR, OSXMMEXCPT, OSXSAVE */
    __asm__ volatile("mov %0, %%cr0; mov %1, %%cr4" ::"r"(cr0), "r"(cr4));
}

static void run_mov_dr(void) {
    u64 v = 0x400;
    __asm__ volatile("mov %1, %%dr7; mov %%dr7, %0" : "=r"(got) : "r"(v));
}

static void run_clts(void) { __asm__ volatile("clts"); }
static void run_wbinvd(void) { __asm__ volatile("wbinvd"); }
static void run_invlpg(void) { __asm__ volatile("invlpg (%0)" ::"r"(area)); }
static void run_sgdt(void) {
    struct { u16 limit; u64 base; } __attribute__((packed)) at;
    __asm__ volatile("sgdt %0" : "=m"(at));
    got = at.base != 0;
}

static void run_ltr(void) {
    u64 at = (u64)&tss;
    tss.rsp0 = (u64)(ring0_stack + sizeof ring0_stack);
    gdt_tss[0] = (sizeof tss - 1) | (at & 0xffffff) << 16 | 0x89ull << 40 | (at >> 24 & 0xff) << 56;
    gdt_tss[1] = at >> 32;
    __asm__ volatile("ltr %w0" ::"r"(48));
}

static void run_lsl(void) {
    u32 limit = 0;
    __asm__ volatile("lsl %1, %0" : "=r"(limit) : "r"(8));
    got = limit;
}

static void run_verw(void) {
    u16 selector = 16;
    __asm__ volatile("verw %0" ::"m"(selector) : "cc");
}

static void run_swapgs(void) { __asm__ volatile("swapgs; swapgs"); }

static void run_wrgsbase(void) {
    u64 cr4;
    __asm__ volatile("mov %%cr4, %0; bts $16, %0; mov %0, %%cr4" : "=r"(cr4));
    __asm__ volatile("wrgsbase %1; rdgsbase %0" : "=r"(got) : "r"(0x1234ull));
}

static void run_sysret(void) {
    wrmsr(STAR, 24ull << 48 | 8ull << 32);
    wrmsr(LSTAR, (u64)attempt_syscall);
    wrmsr(FMASK, 0x200);
    wrmsr(EFER, rdmsr(EFER) | 1);                /* syscall enable */
    map_for_user((u64)attempt_sysret);
    attempt_sysret();
}

static void run_iret_user(void) {
    run_ltr();                                   /* its way back needs a stack; ltr ran before */
    map_for_user((u64)attempt_iret_user);
    attempt_iret_user();
}

static void run_cmpxchg8b(void) {
    u64 *at = (u64 *)area;
    *at = 0x500000007;
    __asm__ volatile("lock cmpxchg8b %0" : "+m"(*at) : "a"(7), "d"(5), "b"(1), "c"(2) : "cc");
    got = *at;
}

static void run_cmpxchg16b(void) {
    u64 *at = (u64 *)area;
    at[0] = 7, at[1] = 5;
    __asm__ volatile("lock cmpxchg16b (%0)" ::"r"(at), "a"(7ull), "d"(5ull), "b"(1ull), "c"(2ull)
                     : "cc", "memory");
    got = at[0] + at[1];
}

static void run_xadd(void) {
    u64 add = 3, at = 4;
    __asm__ volatile("lock xadd %0, %1" : "+r"(add), "+m"(at)::"cc");
    got = at * 10 + add;
}

static void run_bts(void) {
    u64 at = 0;
    __asm__ volatile("lock btsq $4, %0" : "+m"(at)::"cc");
    got = at;
}

static void run_bsf(void) { __asm__ volatile("bsf %1, %0" : "=r"(got) : "r"(0x80ull)); }
static void run_popcnt(void) { __asm__ volatile("popcnt %1, %0" : "=r"(got) : "r"(0xffull)); }
static void run_tzcnt(void) { __asm__ volatile("tzcnt %1, %0" : "=r"(got) : "r"(0x80ull)); }
static void run_movbe(void) {
    u64 at = 1;
    __asm__ volatile("movbe %1, %0" : "=r"(got) : "m"(at));
}

static void run_crc32(void) {
    u64 sum = 0;
    __asm__ volatile("crc32q %1, %0" : "+r"(sum) : "r"(1ull));
    got = sum != 0;
}

static void run_mfence(void) { __asm__ volatile("mfence" ::: "memory"); }
static void run_lfence(void) { __asm__ volatile("lfence" ::: "memory"); }
static void run_sfence(void) { __asm__ volatile("sfence" ::: "memory"); }
static void run_clflush(void) { __asm__ volatile("clflush %0" : "+m"(area[0])); }
static void run_clflushopt(void) { __asm__ volatile("clflushopt %0" : "+m"(area[0])); }
static void run_prefetch(void) { __asm__ volatile("prefetcht0 %0" ::"m"(area[0])); }
static void run_rdtsc(void) { got = rdtsc() != 0; }
static void run_rdtscp(void) { __asm__ volatile("rdtscp" ::: "rax", "rcx", "rdx"); }
static void run_rdpid(void) { __asm__ volatile("rdpid %%rax" ::: "rax"); }
static void run_rdrand(void) { __asm__ volatile("rdrand %%rax" ::: "rax", "cc"); }
static void run_rdseed(void) { __asm__ volatile("rdseed %%rax" ::: "rax", "cc"); }
static void run_clac(void) { __asm__ volatile("clac"); }
static void run_stac(void) { __asm__ volatile("stac; clac"); }
static void run_invpcid(void) {
    struct { u64 pcid, address; } all = {0, 0};
    __asm__ volatile("invpcid %0, %1" ::"m"(all), "r"(2ull) : "memory");
}

static void run_fninit(void) {
    u16 control = 0;
    __asm__ volatile("fninit; fnstcw %0" : "=m"(control));
    got = control;
}

static void run_ldmxcsr(void) {
    u32 mxcsr = 0x1f80;
    __asm__ volatile("ldmxcsr %1; stmxcsr %0" : "=m"(mxcsr) : "m"(mxcsr));
    got = mxcsr;
}

static void run_fxsave(void) { __asm__ volatile("fxsave64 %0" : "=m"(area)); }
static void run_fxrstor(void) { __asm__ volatile("fxsave64 %0; fxrstor64 %0" : "+m"(area)); }

static void run_sse(void) {
    u64 from[2] __attribute__((aligned(16))) = {3, 4}, to[2] __attribute__((aligned(16)));
    __asm__ volatile("movaps %1, %%xmm0; paddq %%xmm0, %%xmm0; movaps %%xmm0, %0"
                     : "=m"(to) : "m"(from));
    got = to[0] + to[1];
}

static void run_xsetbv(void) {
    __asm__ volatile("xgetbv; or $3, %%eax; xsetbv" ::"c"(0) : "rax", "rdx");
}

static void run_xgetbv(void) {
    u32 low;
    __asm__ volatile("xgetbv" : "=a"(low) : "c"(0) : "rdx");
    got = low & 1;
}

static void run_xsave(void) {
    zero(area, sizeof area);
    __asm__ volatile("xsave64 %0" : "+m"(area) : "a"(3), "d"(0));
}

static void run_xsaveopt(void) { __asm__ volatile("xsaveopt64 %0" : "+m"(area) : "a"(3), "d"(0)); }
static void run_xsavec(void) { __asm__ volatile("xsavec64 %0" : "+m"(area) : "a"(3), "d"(0)); }

static void run_xrstor(void) {
    run_xsave();
    __asm__ volatile("xrstor64 %0" : "+m"(area) : "a"(3), "d"(0));
}

#define BASE {0, 0, 0}
#define OF(leaf, reg, bit) {leaf, reg, bit}
#define SUB(leaf, sub, reg, bit) {(leaf) | (sub) << 24, reg, bit}

static const struct instruction table[] = {
    {"cpuid", BASE, run_cpuid, NO_FAULT, 1},
    {"rdmsr", BASE, run_rdmsr, NO_FAULT, 1},
    {"wrmsr", BASE, run_wrmsr, NO_FAULT, 0},
    {"mov-cr", BASE, run_mov_cr, NO_FAULT, 0},
    {"mov-dr", BASE, run_mov_dr, NO_FAULT, 0x400},
    {"clts", BASE, run_clts, NO_FAULT, 0},
    {"sgdt", BASE, run_sgdt, NO_FAULT, 1},
    {"ltr", BASE, run_ltr, NO_FAULT, 0},
    {"lsl", BASE, run_lsl, NO_FAULT, 0xffffffff},
    {"verw", BASE, run_verw, NO_FAULT, 0},
    {"invlpg", BASE, run_invlpg, NO_FAULT, 0},
    {"wbinvd", BASE, run_wbinvd, NO_FAULT, 0},
    {"swapgs", BASE, run_swapgs, NO_FAULT, 0},
    {"int3", BASE, run_int3, BREAKPOINT, 0},
    {"ud2", BASE, run_ud2, INVALID_OPCODE, 0},
    {"iret", BASE, attempt_iret, NO_FAULT, 0},
    {"cmpxchg8b", BASE, run_cmpxchg8b, NO_FAULT, 0x200000001},
    {"cmpxchg16b", OF(1, ECX, 13), run_cmpxchg16b, NO_FAULT, 3},
    {"xadd", BASE, run_xadd, NO_FAULT, 74},
    {"bts", BASE, run_bts, NO_FAULT, 16},
    {"bsf", BASE, run_bsf, NO_FAULT, 7},
    {"popcnt", OF(1, ECX, 23), run_popcnt, NO_FAULT, 8},
    {"tzcnt", OF(7, EBX, 3), run_tzcnt, NO_FAULT, 7},
    {"movbe", OF(1, ECX, 22), run_movbe, NO_FAULT, 1ull << 56},
    {"crc32", OF(1, ECX, 20), run_crc32, NO_FAULT, 1},
    {"mfence", BASE, run_mfence, NO_FAULT, 0},
    {"lfence", BASE, run_lfence, NO_FAULT, 0},
    {"sfence", BASE, run_sfence, NO_FAULT, 0},
    {"prefetch", BASE, run_prefetch, NO_FAULT, 0},
    {"clflush", OF(1, EDX, 19), run_clflush, NO_FAULT, 0},
    {"clflushopt", OF(7, EBX, 23), run_clflushopt, NO_FAULT, 0},
    {"rdtsc", BASE, run_rdtsc, NO_FAULT, 1},
    {"rdtscp", OF(0x80000001, EDX, 27), run_rdtscp, NO_FAULT, 0},
    {"rdpid", OF(7, ECX, 22), run_rdpid, NO_FAULT, 0},
    {"rdrand", OF(1, ECX, 30), run_rdrand, NO_FAULT, 0},
    {"rdseed", OF(7, EBX, 18), run_rdseed, NO_FAULT, 0},
    {"clac", OF(7, EBX, 20), run_clac, NO_FAULT, 0},
    {"stac", OF(7, EBX, 20), run_stac, NO_FAULT, 0},
    {"invpcid", OF(7, EBX, 10), run_invpcid, NO_FAULT, 0},
    {"wrgsbase", OF(7, EBX, 0), run_wrgsbase, NO_FAULT, 0x1234},
    {"fninit", BASE, run_fninit, NO_FAULT, 0x37f},
    {"ldmxcsr", BASE, run_ldmxcsr, NO_FAULT, 0x1f80},
    {"sse", BASE, run_sse, NO_FAULT, 14},
    {"fxsave", BASE, run_fxsave, NO_FAULT, 0},
    {"fxrstor", BASE, run_fxrstor, NO_FAULT, 0},
    {"xgetbv", OF(1, ECX, 26), run_xgetbv, NO_FAULT, 1},
    {"xsetbv", OF(1, ECX, 26), run_xsetbv, NO_FAULT, 0},
    {"xsave", OF(1, ECX, 26), run_xsave, NO_FAULT, 0},
    {"xsaveopt", SUB(0xd, 1, EAX, 0), run_xsaveopt, NO_FAULT, 0},
    {"xsavec", SUB(0xd, 1, EAX, 1), run_xsavec, NO_FAULT, 0},
    {"xrstor", OF(1, ECX, 26), run_xrstor, NO_FAULT, 0},
    {"iret-user", BASE, run_iret_user, BREAKPOINT, 0},
    {"sysret", BASE, run_sysret, NO_FAULT, 0},
};

static u32 absent, failed, fine;

static void try(const struct instruction *i) {
    if (!promised(&i->promise)) {
        absent++;
        say("cpu insn=%s result=absent", i->name);
        return;
    }
    say("cpu-try insn=%s", i->name);
    got = 0;
    u32 vector = attempt(i->run);
    bool ok = vector == i->vector && got == i->want;
    ok ? fine++ : failed++;
    if (vector != i->vector && vector != NO_FAULT)
        say("cpu insn=%s result=fault vector=%u", i->name, vector);
    else if (!ok)
        say("cpu insn=%s result=wrong value=%lx wanted=%lx", i->name, got, i->want);
    else
        say("cpu insn=%s result=ok", i->name);
}

/* Whether the list names this word, with or without '-' in front. */
static bool listed(const char *list, const char *word, bool excluded) {
    for (const char *at = list; at;) {
        u32 len = span(at, ',', ',');
        bool minus = *at == '-';
        if (minus == excluded && is(at + minus, len - minus, word)) return true;
        at = at[len] == ',' ? at + len + 1 : NULL;
    }
    return false;
}

void instructions_try(const char *list) {
    absent = failed = fine = 0;
    bool all = listed(list, "all", false) || *list == '-';
    for (u32 i = 0; i < COUNT(table); i++) {
        bool wanted = all ? !listed(list, table[i].name, true) : listed(list, table[i].name, false);
        if (wanted) try(&table[i]);
    }
    say("cpu-done ok=%u failed=%u absent=%u", fine, failed, absent);
}
