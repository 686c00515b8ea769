"""What a draft is taught by: objectives, losses per row, credit per token."""
