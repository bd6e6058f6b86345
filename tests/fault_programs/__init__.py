# SPDX-License-Identifier: Apache-2.0
"""The programs that test_faults.py runs in processes of their own, by theme.

A program that finds something wrong raises, so that its exit code and its traceback say so.
"""
