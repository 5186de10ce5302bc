"""What an older transformers saves, which its next main version reads."""

import write_transformers

if __name__ == "__main__":
    write_transformers.main()
