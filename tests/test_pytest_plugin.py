# SPDX-License-Identifier: Apache-2.0
"""The plugin inside real pytest runs: options, header, fixtures, messages."""

import pytest

pytest_plugins = ["pytester"]

RIGHT = """
    import mla_oracle
    def test_kernel(mla_case, mla_oracle):
        out, lse = mla_oracle.expected(mla_case, precision="f32").values()
        verdict = mla_oracle.check(mla_case, out, lse)
        assert verdict.passed
"""


def test_a_right_kernel_passes_on_every_default_case(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(RIGHT)
    result = pytester.runpytest_subprocess("--mla-seed=5")
    result.assert_outcomes(passed=7)
    result.stdout.fnmatch_lines(["mla-oracle: 0.1.0, *seed 5*"])


def test_the_cases_can_be_given(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(RIGHT)
    case = "paged:heads=1,row=8,value=4,lens=3,scale=0.5"
    result = pytester.runpytest_subprocess("--mla-case", case, "-v")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"*test_kernel*{case}* PASSED*"])


def test_a_wrong_kernel_fails_with_the_place_and_the_id(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest
        @pytest.mark.parametrize("mla_case", ["paged:heads=1,row=8,value=4,lens=3,scale=0.5"], indirect=True)
        def test_kernel(mla_case, mla_oracle):
            out = mla_oracle.expected(mla_case)["out"]
            out[0, 0, 2] += 1
            mla_oracle.check(mla_case, out)
    """)
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*request 0, head 0, column 2, token 2*", "the case again: mla-oracle case paged:heads=1*"]
    )


def test_other_rules_are_told_beside_a_failure(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        def test_kernel(mla_case, mla_oracle):
            out = mla_oracle.expected(mla_case)["out"]
            mla_oracle.check(mla_case, 1.005 * out)
    """)
    result = pytester.runpytest_subprocess("--mla-rules=nmse+seed")
    result.assert_outcomes(failed=7)
    result.stdout.fnmatch_lines(["rule nmse would accept: NMSE*", "rule seed would reject: *"])


def test_numerics_are_declared_for_all_tests_or_for_one(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        def test_kernel(mla_case, mla_oracle):
            out, lse = mla_oracle.expected(mla_case).values()
            out = out.astype("float16").astype("float32")
            mla_oracle.check(mla_case, out, lse)
    """)
    pytester.runpytest_subprocess().assert_outcomes(failed=7)
    pytester.runpytest_subprocess("--mla-numerics", "value_accumulator=f16").assert_outcomes(passed=7)
    pytester.makepyfile("""
        def test_kernel(mla_case, mla_oracle):
            out, lse = mla_oracle.expected(mla_case).values()
            mla_oracle.check(mla_case, out.astype("float16").astype("float32"), lse, numerics="value_accumulator=f16")
            if mla_case.kind == "paged":
                assert mla_oracle.check(mla_case, out, lse).numerics["origin"].startswith("preset strict")
    """)
    pytester.runpytest_subprocess("--mla-numerics=strict").assert_outcomes(passed=7)


def test_bad_input_is_an_error_with_one_line(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(RIGHT)
    result = pytester.runpytest_subprocess("--mla-case", "paged:heads=0")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*InputError: case id 'paged:heads=0' has heads=0, expected a positive integer"])


def test_a_run_that_does_not_use_it_imports_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import sys
        def test_nothing():
            assert "numpy" not in sys.modules
    """)
    pytester.runpytest_subprocess("-p", "no:hypothesispytest").assert_outcomes(passed=1)


def test_it_can_be_switched_off(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest_subprocess("-p", "no:mla_oracle")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("mla-oracle:*")


def test_a_wrong_lse_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        def test_kernel(mla_case, mla_oracle):
            out, lse = mla_oracle.expected(mla_case).values()
            mla_oracle.check(mla_case, out, lse + 0.1)
    """)
    pytester.runpytest_subprocess().assert_outcomes(failed=7)


def test_the_seed_reaches_the_cases(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        def test_kernel(mla_case):
            assert "seed=5" in mla_case.id
    """)
    pytester.runpytest_subprocess("--mla-seed=5").assert_outcomes(passed=7)
