# SPDX-License-Identifier: Apache-2.0
"""The programs by name."""

PROGRAMS = {}


def program(function):
    """Makes a function one that can be run by its name."""
    PROGRAMS[function.__name__] = function
    return function
