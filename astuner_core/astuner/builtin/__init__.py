"""What comes in the box. The core registers it through the same hooks as anybody; nothing may import it by name."""
