"""Operations in plain torch: any device, any element type."""
