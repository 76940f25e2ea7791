/*
 * A way back from code that may fault, and the round trips to ring 3 (Intel SDM 2B, "SYSRET",
 * "IRET"). attempt_rsp is the stack to return to; zero means that a fault is a failure of ours.
 */
        .text
        .globl  attempt_call, attempt_return, attempt_syscall, attempt_sysret, attempt_iret
        .globl  attempt_iret_user

attempt_call:                                   /* u32 attempt_call(void (*code)(void)) */
        push    %rbx
        push    %rbp
        push    %r12
        push    %r13
        push    %r14
        push    %r15
        sub     $8, %rsp
        mov     %rsp, attempt_rsp
        call    *%rdi
        mov     $256, %eax                      /* NO_FAULT */
        jmp     1f
attempt_return:                                 /* _Noreturn void attempt_return(u32 vector) */
        mov     %edi, %eax
1:      mov     attempt_rsp, %rsp
        movq    $0, attempt_rsp
        mov     $16, %ecx                       /* ring 3 leaves a null stack segment behind */
        mov     %ecx, %ss
        cld
        add     $8, %rsp
        pop     %r15
        pop     %r14
        pop     %r13
        pop     %r12
        pop     %rbp
        pop     %rbx
        ret

attempt_sysret:
        mov     $user_syscall, %ecx
        mov     $2, %r11d
        sysretq
user_syscall:
        syscall
attempt_syscall:                                /* what LSTAR names */
        mov     $256, %edi
        mov     attempt_rsp, %rsp
        jmp     attempt_return

attempt_iret:
        mov     %rsp, %rax
        push    $16
        push    %rax
        push    $2
        push    $8
        push    $1f
        iretq
1:      ret

attempt_iret_user:                              /* ends in an exception, vector 3 */
        push    $32 + 3
        push    $user_stack
        push    $2
        push    $40 + 3
        push    $user_int3
        iretq
user_int3:
        int3

        .bss
        .globl  attempt_rsp
        .align  16
attempt_rsp: .quad 0
        .skip   256
user_stack:
