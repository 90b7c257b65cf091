"""The devices that programs are compiled for, attached or not."""
