"""The routes of Text Generation Inference (TGI), for its clients."""
