"""The counts of instructions in loops, from machine code written by hand."""

from tests.kernels import sass

CODE = """
.L_x_1:
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT ;
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR11], R13 ;
        /*0030*/              @!P1 BRA `(.L_x_7) ;
.L_x_2:
        /*0040*/               @P2 BRA `(.L_x_3) ;
        /*0050*/                   LDSM.16.M88.4 R104, [R118] ;
        /*0060*/                   STSM.16.M88.4 [R118], R104 ;
.L_x_3:
        /*0070*/                   MUFU.EX2 R1, R2 ;
        /*0080*/                   MUFU.EX2 R3, R4 ;
.L_x_4:
        /*0090*/                   HGMMA.64x64x16.F32.BF16 R88, R24, gdesc[UR8].tnspB, R88 ;
        /*00a0*/               @P3 BRA `(.L_x_4) ;
        /*00b0*/               @P0 BRA `(.L_x_1) ;
        /*00c0*/                   EXIT ;
.L_x_7:
        /*00d0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR11], R13 ;
        /*00e0*/              @!P1 BRA `(.L_x_7) ;
        /*00f0*/                   BRA `(.L_x_2) ;
"""


def test_counts_of_a_round():
    """Repeated waits and skipped code do not count; an inner loop counts as often as it runs."""
    for trips in (1, 3):
        (loop,) = sass.find_loops(CODE, trips)
        counts = {'HGMMA': 1 + trips, 'SYNCS': 1, 'BRA': 3 + trips, 'MUFU': 2}
        assert loop.counts == counts and loop.tensor_cycles == 64 + 32 * trips


def test_a_product_is_not_passed_over():
    """A branch around a loop that always runs is not taken."""
    guarded = CODE.replace('.L_x_3:\n', '.L_x_3:\n        /*0068*/ @P4 BRA `(.L_x_5) ;\n')
    guarded = guarded.replace('        /*00b0*/', '.L_x_5:\n        /*00b0*/')
    (loop,) = sass.find_loops(guarded)
    assert loop.counts['HGMMA'] == 2 and loop.counts['MUFU'] == 2
